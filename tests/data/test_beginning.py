"""A text begins as its tokenizer's makers begin it, once, in every use; and what follows a prompt is encoded and decoded behind it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fullband.data import Tokenizer, load_tokenizer
from fullband.data.chat import ChatEncoder
from fullband.data.chat_template import ChatTemplate, load_chat_template
from fullband.decode import generate_texts
from fullband.decode.texts import RowText
from fullband.evaluate.harness.text import HarnessText

WITH_BOS = "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
WITHOUT = WITH_BOS.removeprefix("{{ bos_token }}")
TEXTS = ["the end", " the", "", "é → 🙂", "the\nend the"]
CHAT = [{"role": "user", "content": "the end"}, {"role": "assistant", "content": "the end"}]


def llama_like(folder: Path, template: str | None = None, **settings: object) -> Path:
    """Words with "▁" before them, bytes as a fallback, `<s>` before every text: ids 0 <unk>, 1 <s>, 2 </s>."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    for piece in ("▁", "▁the", "▁end", "the", "end", *":useraitn"):
        vocabulary.setdefault(piece, len(vocabulary))
    pairs = [("t", "h"), ("th", "e"), ("▁", "the"), ("e", "n"), ("en", "d"), ("▁", "end")]
    for piece in ("h", "d", "th", "en"):
        vocabulary.setdefault(piece, len(vocabulary))
    backend = Backend(models.BPE(vocab=vocabulary, merges=pairs, byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", **settings)
    theirs.chat_template = template
    theirs.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_like(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llama(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.mark.parametrize("saved", [False, True])
def test_a_text_begins_as_in_transformers(folder: Path, llama: Tokenizer, saved: bool, tmp_path: Path) -> None:
    if saved:
        llama.save(tmp_path)
        folder = tmp_path
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ours.begin(text) == theirs(text).input_ids
        assert ours.encode_documents([text])[0].tolist() == [*theirs(text).input_ids, 2]
        assert ours.encode(text) == theirs(text, add_special_tokens=False).input_ids
    assert ours.begin("<s>the end") == theirs("<s>the end", add_special_tokens=False).input_ids, "once"


@pytest.mark.parametrize("add", [False, True])
def test_a_setting_beside_the_file_decides(tmp_path: Path, add: bool) -> None:
    folder = llama_like(tmp_path, add_bos_token=add)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.begin("the end") == theirs("the end").input_ids
    assert bool(ours.lead) == add


@pytest.mark.parametrize("template", [WITH_BOS, WITHOUT])
def test_a_template_that_writes_the_beginning_is_not_doubled(tmp_path: Path, template: str) -> None:
    folder = llama_like(tmp_path, template)
    ours, own, theirs = load_tokenizer(folder), load_chat_template(folder), AutoTokenizer.from_pretrained(folder)
    written = template is WITH_BOS
    expected = theirs(theirs.apply_chat_template(CHAT, tokenize=False), add_special_tokens=not written).input_ids
    assert ours.begin(own.render(CHAT, add_generation_prompt=False)) == expected and expected.count(1) == 1
    assert HarnessText.of_folder(folder).encode(own.render(CHAT, add_generation_prompt=False)) == expected


def test_generation_reads_the_prompt_with_its_beginning(llama: Tokenizer, isometric_model) -> None:  # type: ignore[no-untyped-def]
    model = isometric_model(vocab_size=llama.vocab_size)
    text, ids = (generate_texts(model, llama, [prompt], max_new_tokens=4, stop_ids=[]) for prompt in ("the", llama.begin("the")))
    assert text == ids


def test_what_follows_a_prompt_is_encoded_as_in_the_whole_text(llama: Tokenizer) -> None:
    for before, after in [("user:", "the end"), ("the\n", "end"), ("the", " end"), ("the</s>", "end")]:
        assert [*llama.encode(before), *llama.follow(before, after)] == llama.encode(before + after)
    assert llama.decode(llama.follow("t", "he")) == "he", "a token that would span the border"


def test_an_answer_in_training_is_tokens_of_the_whole_conversation(llama: Tokenizer) -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    (answer,) = ChatEncoder(llama, template, 512).answers(CHAT)  # type: ignore[arg-type]
    assert answer.tokens.tolist() == llama.begin(template.render(CHAT, add_generation_prompt=False))  # type: ignore[arg-type]
    assert llama.decode(answer.tokens[answer.prompt :].tolist()) == "the end</s>"


def test_new_tokens_keep_the_space_before_the_first_word(llama: Tokenizer) -> None:
    prompt, new = llama.begin("the"), llama.follow("the", " end the")
    row = RowText(llama, prompt, [], 0)
    assert "".join([*map(row.push, new), row.finish()]) == " end the" == llama.decode_behind(prompt, new)
    assert llama.decode_behind([1], llama.encode("the end")) == "the end", "nothing but a beginning stands before it"
    assert llama.decode_behind([], llama.encode("the end")) == "the end"


@pytest.mark.parametrize("text", ["日本語日本語日本語日本語", "the 日本語日本語 end 🙂🙃🙂🙃 the", "é" * 20 + " the"])
@pytest.mark.parametrize("kind", ["llama", "bytes", "program"])
def test_a_prompt_may_end_between_any_two_bytes(llama: Tokenizer, kind: str, text: str) -> None:
    tokenizer = llama if kind == "llama" else load_tokenizer(kind)
    ids = tokenizer.encode(text)
    heads = [tokenizer.encode(text[:end]) for end in range(len(text) + 1)]
    whole = {len(head): end for end, head in enumerate(heads) if head == ids[: len(head)]}  # characters, by the ids that are theirs
    for cut in range(len(ids)):
        rest = text[whole[max(length for length in whole if length <= cut)] :]
        for before in (ids[:cut], [*tokenizer.lead, *ids[:cut]]):
            assert tokenizer.decode_behind(before, ids[cut:]) == rest, "what the prompt leaves unfinished is given out finished"


def test_broken_bytes_spoil_no_whole_character(llama: Tokenizer) -> None:
    """Of a run of bytes that is not UTF-8, whole characters in it included, a byte fallback makes nothing but U+FFFD."""
    whole, broken, word = llama.encode("日")[1:], [3 + 0xE6], llama.follow("the", " end")
    assert llama.decode_behind(llama.encode("日本"), broken + word) == "\ufffd end", "the prompt's characters are not counted again"
    assert llama.decode_behind(llama.encode("日本"), whole + broken + word) == llama.decode([*whole, *broken, *word]), "as in transformers"
    stream = llama.stream(llama.encode("日本"))
    assert [*map(stream.push, whole + broken + word), stream.finish()] == ["", "", "日", "", "\ufffd end", ""], "what is out stays out"
