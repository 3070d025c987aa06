from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from fullband.data import Tokenizer, build_task, load_tokenizer
from fullband.data.tasks import TaskSource
from fullband.data.tokenizer import SAVED_AS
from fullband.data.tokenizers import ByteTokenizer, TaskTokenizer

TEXT = "Añb → 🙂 <|endoftext|> the end\n\tof it, 数学 e\u0301."


def byte_level(folder: Path, specials: list[str] | None = None, eos: object = None) -> Path:
    """A small byte-level BPE like GPT-2's, with a post-processor that adds <s> in front when asked for special tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", *(specials or [])], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(["the end of the beginning of the thing"] * 4, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))])
    backend.enable_truncation(4)
    backend.enable_padding(length=40)
    backend.save(str(folder / "tokenizer.json"))
    if eos is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return folder


def sentencepiece_like(folder: Path) -> Path:
    """Words with a leading "▁" and bytes as a fallback, decoded as Llama's tokenizer does (the first space is dropped)."""
    vocabulary = {"<unk>": 0, "</s>": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}, "▁": 258, "▁the": 259, "▁end": 260}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.save(str(folder / "tokenizer.json"))
    return folder


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.push(token) for token in ids), stream.finish()]


@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and ids == list(text.encode())
    assert tokenizer.encode_documents([text])[0].tolist() == [*ids, 256]


@given(st.lists(st.integers(0, 300), max_size=40))
def test_byte_streaming_is_decode_in_parts(ids: list[int]) -> None:
    tokenizer = ByteTokenizer()
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)  # also of broken UTF-8, and ids beyond the vocabulary


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(byte_level(tmp_path_factory.mktemp("bpe"), ["<|endoftext|>"]))


@settings(max_examples=60, deadline=None)
@given(st.text())
def test_bpe_round_trip_and_streaming(bpe: Tokenizer, text: str) -> None:
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert "".join(streamed(bpe, ids)) == text


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 319), max_size=30))
def test_bpe_streaming_of_any_ids(bpe: Tokenizer, ids: list[int]) -> None:
    assert "".join(streamed(bpe, ids)) == bpe.decode(ids)


def test_only_whole_characters_are_streamed(bpe: Tokenizer, tmp_path: Path) -> None:
    for tokenizer in (ByteTokenizer(), bpe, load_tokenizer(sentencepiece_like(tmp_path))):
        parts = streamed(tokenizer, tokenizer.encode("a🙂é數"))
        assert "".join(parts) == "a🙂é數"
        assert not any("\ufffd" in part for part in parts)
        assert len([part for part in parts if part]) >= 3  # as they come, not at the end
    assert streamed(ByteTokenizer(), [0x61, 0xF0, 0x9F]) == ["a", "", "", "\ufffd"]  # a generation cut inside a character


def test_half_a_surrogate_pair_is_a_question_mark(bpe: Tokenizer) -> None:
    for tokenizer in (ByteTokenizer(), bpe, load_tokenizer("program")):
        ids = tokenizer.encode("é\ud800x")
        assert tokenizer.decode(ids) == "é?x"
        assert tokenizer.encode_documents(["é\ud800x"])[0].tolist() == [*tokenizer.lead, *ids, tokenizer.end_of_document]


def test_sentencepiece_spaces_survive_streaming(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece_like(tmp_path))
    assert tokenizer.end_of_document == 1
    ids = [259, 260, 259, 260, 260]
    assert streamed(tokenizer, ids) == ["the", " end", " the", " end", " end", ""]


def test_a_document_has_its_marks_but_neither_padding_nor_truncation(bpe: Tokenizer) -> None:
    ids = bpe.encode("the end of it")
    assert bpe.decode(ids) == "the end of it" and 0 not in ids
    assert bpe.encode_documents(["the end of it", "x"])[0].tolist() == [0, *ids, bpe.end_of_document]
    assert bpe.encode("<|endoftext|>") == [bpe.end_of_document]


@pytest.mark.parametrize(
    ("specials", "eos", "end", "stops"),
    [
        (["<|im_end|>", "<|endoftext|>"], "<|im_end|>", "<|endoftext|>", {"<|endoftext|>", "<|im_end|>"}),
        (["[STOP]"], {"content": "[STOP]"}, "[STOP]", {"[STOP]"}),
        (["</s>"], None, "</s>", {"</s>"}),
        ([], "<not there>", None, set()),
    ],
)
def test_the_end_of_document_is_found(tmp_path: Path, specials: list[str], eos: object, end: str | None, stops: set[str]) -> None:
    tokenizer = load_tokenizer(byte_level(tmp_path, specials, eos))
    assert tokenizer.end_of_document == (tokenizer.encode(end)[0] if end else None)
    assert {tokenizer.decode([stop]) for stop in tokenizer.stops} == stops
    length = len(tokenizer.lead) + len(tokenizer.encode("the")) + (end is not None)
    assert len(tokenizer.encode_documents(["the"])[0]) == length


def test_a_model_folder_carries_its_tokenizer(tmp_path: Path) -> None:
    source, model, copy = (tmp_path / name for name in ("source", "model", "copy"))
    for folder in (source, model, copy):
        folder.mkdir()
    task = build_task(TaskSource(group="A5"))
    hugging_face = load_tokenizer(byte_level(source, ["<|im_end|>", "<|endoftext|>"], "<|im_end|>") / "tokenizer.json")
    for tokenizer in (ByteTokenizer(), TaskTokenizer(task.name, task.names), hugging_face):
        tokenizer.save(model)
        loaded = load_tokenizer(model)
        assert type(loaded) is type(tokenizer)
        for name in ("name", "vocab_size", "end_of_document", "stops"):
            assert getattr(loaded, name) == getattr(tokenizer, name)
        text = "0 59 3" if isinstance(tokenizer, TaskTokenizer) else TEXT
        assert loaded.encode(text) == tokenizer.encode(text) and loaded.decode(loaded.encode(text)) == text
    loaded.save(copy)
    assert load_tokenizer(copy).name == hugging_face.name
    loaded.save(model)  # onto itself
    assert (model / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_task_tokens(tmp_path: Path) -> None:
    task = build_task(TaskSource(task="modular", modulus=3))
    tokenizer = TaskTokenizer(task.name, task.names)
    assert tokenizer.names == ["0", "1", "2", "-0", "-1", "-2", "*1", "*2"]
    ids = tokenizer.encode("2 *2 -1")
    assert (ids, tokenizer.decode(ids), streamed(tokenizer, ids)) == ([2, 7, 4], "2 *2 -1", ["2", " *2", " -1", ""])
    with pytest.raises(ValueError, match=r"^'5' is not a token of task:modular 3; write its tokens \(0 1 2 .*\) with spaces between them$"):
        tokenizer.encode("1 5")


def test_bad_tokenizers_are_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(name: object) -> str:
        with pytest.raises(ValueError) as caught:
            load_tokenizer(str(name))
        assert "\n" not in str(caught.value)
        return str(caught.value).replace(str(tmp_path), "DIR")

    assert (
        refusal("byte") == "byte: no such tokenizer; give bytes, program, tiktoken:NAME, or the path of a tokenizer.json or of its folder"
    )
    assert refusal(tmp_path) == f"DIR: no tokenizer in this folder (neither {SAVED_AS} nor tokenizer.json)"
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    assert refusal(tmp_path).startswith("DIR/tokenizer.json: not a readable tokenizer.json (")
    (tmp_path / SAVED_AS).write_text('{"kind": "morse"}')
    assert refusal(tmp_path) == f"DIR/{SAVED_AS}: not a tokenizer description this version can read (kind morse)"
    (tmp_path / SAVED_AS).write_text("{")
    assert refusal(tmp_path).startswith(f"DIR/{SAVED_AS}: not valid JSON (")
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    assert refusal("tiktoken:cl100k_base") == (
        "the tokenizer tiktoken:cl100k_base needs the package tiktoken: pip install 'fullband[data]'"
    )


def test_an_unknown_tiktoken_name() -> None:
    pytest.importorskip("tiktoken")
    with pytest.raises(ValueError, match=r"^tiktoken:cl100k: tiktoken knows no such encoding \(known: .*cl100k_base"):
        load_tokenizer("tiktoken:cl100k")


@pytest.mark.shared_data
def test_long_runs_are_cut_and_nothing_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    import re

    from fullband.data import subword

    monkeypatch.setattr(subword, "LONGEST_RUN", 5)
    monkeypatch.setattr(subword, "_LONG_RUNS", re.compile(r"\S{6,}|\s{6,}"))
    assert subword.short_runs("") == [""] and subword.short_runs("a b c d e f g h") == ["a b c d e f g h"]
    for text in ("x" * 17, "a " + " " * 23 + "b", "one " + "=" * 12 + " two " + "\n" * 30, "12345 123456 12345678901 1"):
        parts = subword.short_runs(text)
        assert "".join(parts) == text and len(parts) > 1
        assert all(len(run) <= 5 for part in parts for run in re.findall(r"\S+|\s+", part))


def test_tiktoken_takes_a_million_of_one_character(shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tiktoken")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(shared_data / "tokenizers" / "tiktoken_cache"))
    tokenizer = load_tokenizer("tiktoken:cl100k_base")
    for text in (" " * 1_000_000 + "a", "a" + "\n" * 300_000 + "b"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.encode_documents([text, "b"])[0].tolist()[:-1] == tokenizer.encode(text)


def test_tiktoken_and_its_hugging_face_twin_agree(shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tiktoken")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(shared_data / "tokenizers" / "tiktoken_cache"))
    one, other = load_tokenizer("tiktoken:cl100k_base"), load_tokenizer(shared_data / "tokenizers" / "cl100k_hf")
    assert one.encode("hello world") == [15339, 1917]
    assert (one.vocab_size, one.end_of_document) == (100277, 100257)
    assert (other.vocab_size, other.end_of_document, other.stops) == (100277, 100257, one.stops)
    text = (shared_data / "corpora" / "wikitext2_valid.txt").read_text(encoding="utf-8")[:20_000] + TEXT
    ids = one.encode(text)
    assert other.encode(text) == ids
    assert [tokens.tolist() for tokens in one.encode_documents(["a", text])] == [
        tokens.tolist() for tokens in other.encode_documents(["a", text])
    ]
    for tokenizer in (one, other):
        assert tokenizer.decode([100_300, *ids, 100_351]) == text  # ids of the padded vocabulary have no text
        assert "".join(streamed(tokenizer, ids[-300:])) == tokenizer.decode(ids[-300:])
    one.save(tmp_path)
    assert load_tokenizer(tmp_path).name == one.name
