"""Text to ids and back as lm-eval's Hugging Face model does it, so that prompts and scores are the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fullband.data.chat_template import ChatTemplate, load_chat_template
from fullband.data.tokenizer import Tokenizer
from fullband.data.tokenizers import load_tokenizer


class HarnessText:
    """A model folder's tokenizer under lm-eval's rules.

    lead        ids that stand before every text: a beginning of sequence, where the tokenizer's own rule or `add_bos` adds one
    prefix      id that stands in for an empty context: the beginning of sequence, else the end
    stops       ids that end a generated text: the eos tokens, without a further end of document
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None = None, add_bos: bool | None = None):
        """Raises ValueError for a tokenizer that has neither a beginning nor an end, and for `add_bos` where there is no beginning."""
        self.tokenizer = tokenizer
        self.template = template or ChatTemplate()
        self._bos = self.template.tokens.get("bos_token")
        bos, eos = (self._id_of(self.template.tokens.get(name)) for name in ("bos_token", "eos_token"))
        if add_bos and bos is None:
            raise ValueError("add_bos_token: this tokenizer names no beginning of sequence")
        self.lead = tokenizer.lead if add_bos is None else (bos,) if add_bos and bos is not None else ()
        end = eos if eos is not None else tokenizer.end_of_document
        self.prefix = bos if bos is not None else end
        self.stops = sorted(tokenizer.stops - {tokenizer.end_of_document} | {eos} if eos is not None else tokenizer.stops)

    @classmethod
    def of_folder(cls, folder: str | Path, add_bos: bool | None = None) -> HarnessText:
        """Raises ValueError in one line for a folder without a tokenizer."""
        return cls(load_tokenizer(folder), load_chat_template(folder), add_bos)

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        """`special` False leaves the lead away; else it is added, unless the text begins with it written out."""
        ids = self.tokenizer.encode(text)
        written = bool(self._bos) and text.startswith(str(self._bos))
        return ids if special is False or written else [*self.lead, *ids]

    def decode(self, ids: Sequence[int], before: Sequence[int] = ()) -> str:
        """The text of ids that follow the ids `before`, without special tokens."""
        return self.tokenizer.decode_behind(before, [token for token in ids if token not in self.tokenizer.special])

    def _id_of(self, written: str | None) -> int | None:
        ids = self.tokenizer.encode(written) if written else []
        return ids[0] if len(ids) == 1 else None
