"""From texts to texts: stop strings, whole characters, samples, streaming by row."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fullband.config import TrunkConfig
from fullband.data.tokenizer import Tokenizer
from fullband.data.tokenizers import ByteTokenizer, load_tokenizer
from fullband.decode import TextCompletion, generate, generate_text, generate_texts, stream_texts
from fullband.decode.texts import StopFilter
from fullband.model import FullBandModel
from reference.toy import ToyModel

DRAWN: dict[str, Any] = {"temperature": 1.2, "top_k": 60, "seed": 3}


@pytest.fixture
def text_model() -> FullBandModel:
    torch.manual_seed(0)
    return FullBandModel(TrunkConfig(vocab_size=257, width=16, layers=1, heads=2, kv_heads=1, glu_width=16, context=64, window=8)).eval()


class Speaker(ToyModel):
    """A trunk and model in one that says given bytes one after the other: at position t its most likely token is text[t]."""

    context, vocab_size = 64, 257
    head_weight = torch.eye(257)

    def __init__(self, text: str):
        self.connect_itself()
        self.says = torch.tensor([*text.encode(), *[256] * 64])

    def embed(self, tokens_BT: Tensor) -> Tensor:
        return self.head_weight[tokens_BT]

    def __call__(self, inputs_BTD: Tensor, positions: object, documents: object, cache: int | None, keep: object) -> tuple[Tensor, int]:
        past, added = cache or 0, inputs_BTD.shape[1]
        return self.head_weight[self.says[past : past + added]].expand(len(inputs_BTD), -1, -1), past + added


def speak(text: str, prompt: str = "?", **settings: Any) -> tuple[TextCompletion, list[str]]:
    pieces: list[str] = []
    made = generate_text(Speaker(text), ByteTokenizer(), prompt, "standard", on_text=pieces.append, **settings)
    assert made.text == "".join(pieces) and "" not in pieces
    return made, pieces


# Stop strings


def test_text_before_a_stop_string_is_kept() -> None:
    made, _ = speak("one two three", stop=" th")
    assert (made.text, made.finish_reason) == ("one two", "stop")
    assert bytes(made.tokens).decode() == "one two th"  # the tokens are all that were made
    assert speak("one two three", stop=["o t", "wo"])[0].text == "one t"  # complete first


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    made, pieces = speak("ab abc abd", stop="abd")
    assert (made.text, pieces) == ("ab abc ", ["ab ", "abc", " "])
    made, pieces = speak("ab ab", stop="abd")  # the end of the text gives it out
    assert (made.text, pieces[-1], made.finish_reason) == ("ab ab", "ab", "stop")  # the tokenizer's stop id
    assert speak("ab ab", stop="abd", max_new_tokens=5)[0] == TextCompletion("ab ab", list(b"ab ab"), "length")


def test_a_stop_string_longer_than_the_text_changes_nothing() -> None:
    made, pieces = speak("short", stop="short" * 50)
    assert (made.text, pieces) == ("short", ["short"])
    assert speak("short", stop="longer than the text")[1] == list("short")


def test_a_stop_string_at_the_limit_is_a_stop() -> None:
    assert speak("abcd", stop="cd", max_new_tokens=4)[0].finish_reason == "stop"
    assert speak("abcd", stop="cd", max_new_tokens=3)[0] == TextCompletion("abc", list(b"abc"), "length")


def test_stop_strings_of_several_bytes_a_character() -> None:
    made, pieces = speak("naïve – déjà vu", stop="– dé")
    assert made.text == "naïve " and all("\ufffd" not in piece for piece in pieces)


def test_the_prompt_is_not_searched() -> None:
    assert speak("???.yz", prompt="stop", stop=["stop", "p."])[0].text == ".yz"


def test_no_stop_string_begins_before_the_minimum() -> None:
    assert speak("a.b.c", stop=".", min_new_tokens=2)[0].text == "a.b"
    assert speak("a.b.c", stop=".", min_new_tokens=1)[0].text == "a"


@pytest.mark.parametrize("stop", ["", ["a", ""]])
def test_an_empty_stop_string_is_refused(stop: str | list[str]) -> None:
    with pytest.raises(ValueError, match="at least one character"):
        speak("abc", stop=stop)


def reference_stop(text: str, strings: list[str]) -> tuple[str, bool]:
    """Character by character."""
    for end in range(len(text) + 1):
        matches = [string for string in strings if text[:end].endswith(string)]
        if matches:
            return text[: end - max(map(len, matches))], True
    return text, False


def test_the_pieces_do_not_matter() -> None:
    """Random texts, stop strings and cuts; at each moment all but a beginning of a stop string has been given out."""
    rng = random.Random(0)
    for _ in range(2000):
        text = "".join(rng.choices("ab", k=rng.randrange(12)))
        strings = ["".join(rng.choices("abc", (4, 4, 1), k=rng.randrange(1, 5))) for _ in range(rng.randrange(4))]
        expected, stops = reference_stop(text, strings)
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(5)))
        filter, given, pushed = StopFilter(strings), "", ""
        for start, end in itertools.pairwise([0, *cuts, len(text)]):
            given += filter.push(text[start:end])
            pushed += text[start:end]
            if not filter.stopped:
                held = pushed.removeprefix(given)
                assert given + held == pushed and (not held or any(string.startswith(held) for string in strings))
                longest = max(
                    (size for size in range(len(pushed) + 1) for s in strings if s.startswith(pushed[len(pushed) - size :])), default=0
                )
                assert len(held) == longest
        given += filter.finish()
        assert (given, filter.stopped) == (expected, stops)


# Batches


def test_texts_in_a_batch_are_those_alone(text_model: FullBandModel) -> None:
    tokenizer, prompts = ByteTokenizer(), ["né", "longer prompt", "x", "日本"]
    settings: dict[str, Any] = {"max_new_tokens": 30, "stop": ["a", "\n", "é"]} | DRAWN
    together = generate_texts(text_model, tokenizer, prompts, n=2, **settings)
    assert len(together) == 8 and {row.finish_reason for row in together} == {"stop", "length"}
    for number, prompt in enumerate(prompts):
        alone = generate_texts(text_model, tokenizer, [prompt], n=2, keys=[number], **settings)
        assert alone == together[2 * number : 2 * number + 2]
        assert generate_text(text_model, tokenizer, prompt, keys=[number], **settings) == alone[0]
    reordered = generate_texts(text_model, tokenizer, prompts[::-1], keys=[3, 2, 1, 0], **settings)
    assert reordered[::-1] == together[::2]


def test_streams_of_rows_join_to_their_texts(text_model: FullBandModel) -> None:
    tokenizer, prompts = ByteTokenizer(), ["ab", "c"]
    settings: dict[str, Any] = {"max_new_tokens": 30, "n": 2, "stop": "xyz"} | DRAWN
    heard: dict[int, list[str]] = {row: [] for row in range(4)}
    made = generate_texts(text_model, tokenizer, prompts, on_text=lambda row, piece: heard[row].append(piece), **settings)
    assert ["".join(pieces) for pieces in heard.values()] == [row.text for row in made]
    assert [row.text for row in made] == [tokenizer.decode(row.tokens) for row in made]
    plain = generate(
        text_model, [tokenizer.encode(prompt) for prompt in prompts], max_new_tokens=30, n=2, stop_ids=tokenizer.stops, **DRAWN
    )
    assert [row.tokens for row in made] == [row.tokens for row in plain]
    steps = list(stream_texts(text_model, tokenizer, prompts, **settings))
    assert all(set(new.texts) <= set(new.tokens) | set(new.finished) and "" not in new.texts.values() for new in steps)
    assert ["".join(new.texts.get(row, "") for new in steps) for row in range(4)] == [row.text for row in made]


def test_a_row_at_a_stop_string_leaves_the_batch(text_model: FullBandModel, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, settings = ByteTokenizer(), {"max_new_tokens": 20} | DRAWN
    whole = generate_texts(text_model, tokenizer, ["a", "b"], **settings)
    steps = stream_texts(text_model, tokenizer, ["a", "b"], stop=whole[0].text[:3], **settings)
    seen = [set(new.tokens) for new in steps]
    first = next(number for number, rows in enumerate(seen) if 0 not in rows)
    assert all(rows == {0, 1} for rows in seen[:first]) and all(rows == {1} for rows in seen[first:-1]) and first < len(seen) - 1


def test_cancelled_text_is_given_out() -> None:
    asked: Iterator[int] = itertools.count()
    made, pieces = speak("abcabc", stop="cab!", cancelled=lambda: next(asked) == 4)
    assert (made, pieces) == (TextCompletion("abca", list(b"abca"), "cancelled"), ["a", "b", "ca"])


def test_closing_the_iterator_ends_it(text_model: FullBandModel) -> None:
    steps = stream_texts(text_model, ByteTokenizer(), ["ab"], max_new_tokens=30)
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    assert list(steps) == []


# Bad and odd input


def word_tokenizer(folder: Path) -> Tokenizer:
    """A tokenizer.json of a few words and a special token."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    backend = Backend(models.WordLevel({"<|endoftext|>": 0, "a": 1, "b": 2, "?": 3}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<|endoftext|>"])
    backend.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


def test_a_prompt_of_special_tokens_is_a_prompt(text_model: FullBandModel, tmp_path: Path) -> None:
    tokenizer = word_tokenizer(tmp_path)
    prompt = "<|endoftext|><|endoftext|>"
    assert tokenizer.encode(prompt) == [0, 0] and tokenizer.stops == {0}
    made = generate_text(text_model, tokenizer, prompt, max_new_tokens=4, stop="a b a b a b")
    assert made.tokens == generate(text_model, [[0, 0]], max_new_tokens=4, stop_ids=[0])[0].tokens
    assert len(generate(text_model, [[256]], max_new_tokens=3)[0].tokens) == 3


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        (["ab", ""], {}, "prompt 1 is empty"),
        ([], {}, "no prompts"),
        ("ab", {}, "a list of texts"),
        (["ab"], {"top_p": 0}, "top_p"),
        (["ab"], {"temperature": -1}, "temperature"),
        (["ab"], {"n": 0}, "n, the samples"),
        (["a" * 60], {}, r"room for 4"),
        (["ab"], {"stop_ids": [257]}, "stop id 257"),
    ],
)
def test_bad_input_is_one_line_and_at_once(text_model: FullBandModel, prompts: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        stream_texts(text_model, ByteTokenizer(), prompts, **({"max_new_tokens": 5} | settings))
    assert "\n" not in str(error.value)


def test_one_text_has_one_sample(text_model: FullBandModel) -> None:
    with pytest.raises(ValueError, match="makes one text, not n=2"):
        generate_text(text_model, ByteTokenizer(), "ab", n=2, max_new_tokens=5)


def test_tokens_the_model_does_not_have(tmp_path: Path) -> None:
    """A tokenizer with more ids than the model: its prompts are refused by position, its stop ids do not matter."""
    torch.manual_seed(0)
    small = FullBandModel(TrunkConfig(vocab_size=100, width=16, layers=1, heads=2, kv_heads=1, glu_width=16, context=64, window=8))
    with pytest.raises(ValueError, match=r"prompt 1: token id 122 at position 1 is outside 0\.\.99"):
        generate_texts(small, ByteTokenizer(), ["AB", "Az"], max_new_tokens=3)
    assert len(generate_text(small, ByteTokenizer(), "AB", max_new_tokens=3).tokens) == 3
