"""Tokenizers made by others: a Hugging Face tokenizer.json and the names tiktoken knows."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fullband.data.optional import optional
from fullband.data.tokenizer import BytesOfIds, Tokenizer

# A chat tokenizer's eos ends a turn (<|im_end|>), and the text it was pretrained on ends with another token: that one comes first.
_ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>")
_OTHER_ENDS = ("</s>", "<eos>", "[EOS]", "<|im_end|>", "<|eot_id|>", "[SEP]")


_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")  # say what special tokens are called


LONGEST_RUN = 100_000  # characters
_LONG_RUNS = re.compile(rf"\S{{{LONGEST_RUN + 1},}}|\s{{{LONGEST_RUN + 1},}}")


class HuggingFaceTokenizer(Tokenizer):
    """Any tokenizer.json. `encode` adds no special token; what the post-processor puts before a text is `lead`.

    The end of document is <|endoftext|> or <|end_of_text|> where the vocabulary has one, else the eos token that the
    tokenizer_config.json or special_tokens_map.json beside it names, else a usual name (</s>, <eos>, ...), else none. Generation stops at
    it, at that eos token, and at the ids a generation_config.json beside it names (a chat model's end of turn).

    Added tokens beyond the model's vocabulary, which the config.json beside it says, are text: Gemma 3 has one that stands for pictures.
    """

    def __init__(
        self, path: Path, end_of_document: int | None = None, stops: frozenset[int] | None = None, vocabulary: int | None = None
    ) -> None:
        """`end_of_document` and `stops` are looked up unless `stops` is given, the size of the model's `vocabulary` unless that is.
        ValueError if the file is no tokenizer."""
        from tokenizers import Tokenizer as Backend

        try:
            content = path.read_bytes()
            self._backend = Backend.from_buffer(content)
            beyond = vocabulary or _vocabulary(path.parent)
            if beyond and any(token >= beyond for token in self._backend.get_added_tokens_decoder()):
                self._backend = Backend.from_str(_without_added(content, beyond))
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError(f"{path}: not a readable tokenizer.json ({_one_line(error)})") from None
        self._backend.no_padding()
        self._backend.no_truncation()
        # Read at once: the folder may be a checkpoint that a run deletes later.
        self._beside = {name: (path.parent / name).read_bytes() for name in _BESIDE if (path.parent / name).is_file()}
        self._content = content
        known = self._backend.get_vocab(with_added_tokens=True)
        self.name = f"tokenizer.json:{hashlib.sha256(content).hexdigest()[:16]}"
        self.vocab_size = max(known.values()) + 1  # ids can have holes, so not their number
        if stops is None:
            eos = _eos_token(path.parent)
            names = [name for name in (*_ENDS_OF_TEXT, eos, *_OTHER_ENDS) if name in known]
            end_of_document = known[names[0]] if names else None
            stops = frozenset(known[name] for name in (*names[:1], eos) if name in known) | _eos_ids(path.parent)
        self.end_of_document = end_of_document
        self.stops = stops
        self.special = frozenset(token for token, added in self._backend.get_added_tokens_decoder().items() if added.special)
        self.lead = self._lead(known)

    def _lead(self, vocabulary: dict[str, int]) -> tuple[int, ...]:
        """What the post-processor puts before a text; as in transformers, an add_bos_token beside the file overrides it."""
        settings = _settings(self._beside.get("tokenizer_config.json"))
        bos = settings.get("bos_token")
        bos = bos.get("content") if isinstance(bos, dict) else bos
        if isinstance(wanted := settings.get("add_bos_token"), bool):
            return (vocabulary[bos],) if wanted and bos in vocabulary else ()
        with_marks, text = (self._backend.encode("a", add_special_tokens=add).ids for add in (True, False))
        return tuple(with_marks[: with_marks.index(text[0])] if text and text[0] in with_marks else ())

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(_well_formed(text), add_special_tokens=False).ids

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._backend.encode_batch_fast(list(map(_well_formed, texts)), add_special_tokens=False)  # in parallel over the texts
        return [self._ended(self._begun(encoding.ids)) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode([token for token in ids if 0 <= token < self.vocab_size], skip_special_tokens=False)

    def description(self) -> dict[str, Any]:
        return {"kind": "huggingface", "end_of_document": self.end_of_document, "stops": sorted(self.stops)}

    def save(self, folder: str | Path) -> None:
        """The tokenizer.json byte for byte, the files that name its special tokens, and our description."""
        folder = Path(folder)
        (folder / "tokenizer.json").write_bytes(self._content)
        for name, content in self._beside.items():
            (folder / name).write_bytes(content)
        super().save(folder)


class TiktokenTokenizer(BytesOfIds):
    """An encoding by the name tiktoken gives it (cl100k_base, ...). tiktoken downloads it once, or reads TIKTOKEN_CACHE_DIR."""

    def __init__(self, name: str) -> None:
        """ValueError if tiktoken is missing, does not know the name, or can't get the file."""
        tiktoken = optional("tiktoken", f"the tokenizer tiktoken:{name}")
        known = tiktoken.list_encoding_names()
        if name not in known:
            raise ValueError(f"tiktoken:{name}: tiktoken knows no such encoding (known: {', '.join(known)})")
        try:
            self._encoding = tiktoken.get_encoding(name)
        except Exception as error:  # requests' many kinds, and a damaged cache
            raise ValueError(
                f"tiktoken:{name}: its file could not be loaded ({_one_line(error)}); connect once, or set TIKTOKEN_CACHE_DIR"
            ) from None
        self.name = f"tiktoken:{name}"
        self.vocab_size = self._encoding.n_vocab
        self.end_of_document = self._encoding.eot_token
        self.stops = frozenset({self._encoding.eot_token})
        self.special = frozenset(self._encoding.encode_single_token(name) for name in self._encoding.special_tokens_set)

    def encode(self, text: str) -> list[int]:
        return [token for part in short_runs(text) for token in self._encoding.encode(part, allowed_special="all")]

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        parts = [short_runs(text) for text in texts]
        found = iter(
            self._encoding.encode_batch([part for of_text in parts for part in of_text], num_threads=self.threads, allowed_special="all")
        )
        return [self._ended([token for _ in of_text for token in next(found)]) for of_text in parts]

    def bytes_of(self, token: int) -> bytes:
        try:
            return self._encoding.decode_single_token_bytes(token)
        except (KeyError, OverflowError):
            return b""

    def description(self) -> dict[str, Any]:
        return {"kind": "tiktoken", "name": self.name.removeprefix("tiktoken:")}


def short_runs(text: str) -> list[str]:
    """The text in parts without a run of more than LONGEST_RUN characters that are all white or all not: on a million of one character
    tiktoken's regular expression runs out of stack, which some versions panic on. Most texts are a single part."""
    if len(text) <= LONGEST_RUN:
        return [text]
    parts, start = [], 0
    for run in _LONG_RUNS.finditer(text):
        while run.end() - max(start, run.start()) > LONGEST_RUN:
            stop = max(start, run.start()) + LONGEST_RUN
            parts.append(text[start:stop])
            start = stop
    return [*parts, text[start:]]


def _well_formed(text: str) -> str:
    """Half a surrogate pair, which JSON can spell and broken bytes on a command line become, is no text: "?", as in a byte tokenizer."""
    return text if text.isascii() else text.encode("utf-8", errors="replace").decode("utf-8")


def _eos_token(folder: Path) -> str | None:
    """The eos token that the usual files beside a tokenizer.json name."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        eos = _field(folder / name, "eos_token")
        eos = eos.get("content") if isinstance(eos, dict) else eos
        if isinstance(eos, str):
            return eos
    return None


def _vocabulary(folder: Path) -> int | None:
    """The size of the vocabulary of the model beside a tokenizer; of its text, where it has other inputs too."""
    config = folder / "config.json"
    nested = (_field(config, key) for key in ("trunk_config", "trunk", "text_config"))
    sizes = [_field(config, "vocab_size"), *(part.get("vocab_size") for part in nested if isinstance(part, dict))]
    return next((size for size in sizes if isinstance(size, int) and size > 0), None)


def _without_added(content: bytes, beyond: int) -> str:
    """A tokenizer.json without its added tokens from id `beyond` on."""
    found = json.loads(content)
    found["added_tokens"] = [token for token in found["added_tokens"] if token["id"] < beyond]
    return json.dumps(found, ensure_ascii=False)


def _eos_ids(folder: Path) -> frozenset[int]:
    found = _field(folder / "generation_config.json", "eos_token_id")
    return frozenset(token for token in (found if isinstance(found, list) else [found]) if isinstance(token, int))


def _field(path: Path, key: str) -> Any:
    """None if the file is not there or not readable: such files only help, the tokenizer itself is tokenizer.json."""
    try:
        return json.loads(path.read_text(encoding="utf-8")).get(key)
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


def _settings(content: bytes | None) -> dict[str, Any]:
    try:
        found = json.loads(content or b"{}")
    except (ValueError, RecursionError):
        return {}  # it only helps
    return found if isinstance(found, dict) else {}


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
