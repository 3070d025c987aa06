from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decode.cases import padded, random_prompts
from fullband.config import TrunkConfig
from fullband.data.tokenizers import ByteTokenizer
from fullband.decode import generate, generate_text, resolve_mode, stream
from fullband.model import FullBandModel
from reference.decoding import reference_greedy
from reference.toy import ToyModel


@pytest.mark.parametrize(("mode", "passes"), [("standard", None), ("soft", None), ("fused", None), ("fused", 2), ("fused", "exact")])
def test_greedy_equals_full_recomputation(model: FullBandModel, mode: str, passes: int | str | None) -> None:
    prompts = random_prompts([1, 8, 17])
    resolved = resolve_mode(mode, passes)
    expected = reference_greedy(model, prompts, 9, resolved.feedback_passes, resolved.feeds_back)
    for chunk in (None, 5):
        made = generate(model, prompts, mode, passes, max_new_tokens=9, chunk=chunk)
        assert [row.tokens for row in made] == expected
        assert {row.finish_reason for row in made} == {"length"}


def test_padded_tensors_are_prompts_too(model: FullBandModel) -> None:
    prompts = random_prompts([3, 8])
    expected = generate(model, prompts, max_new_tokens=6)
    for side in ("left", "right"):
        tokens, mask = padded(prompts, side)
        assert generate(model, tokens, max_new_tokens=6, mask=mask) == expected


def test_first_new_token_of_soft_is_that_of_standard(model: FullBandModel) -> None:
    prompts = random_prompts([4, 9, 15, 2, 11])
    standard, soft = (generate(model, prompts, mode, max_new_tokens=12) for mode in ("standard", "soft"))
    assert [row.tokens[0] for row in standard] == [row.tokens[0] for row in soft]
    assert [row.tokens for row in standard] != [row.tokens for row in soft]


@pytest.mark.parametrize("mode", ["standard", "soft", "fused"])
def test_same_seed_same_text_in_a_batch_of_1_and_of_8(model: FullBandModel, mode: str) -> None:
    """Row 0 of any batch is keyed by (seed, 0): its neighbours, their lengths and their ends do not matter."""
    prompts = random_prompts([6, 11, 3, 6, 19, 1, 8, 14])
    settings = {"max_new_tokens": 10, "temperature": 1.3, "seed": 4}
    together = generate(model, prompts, mode, **settings)
    assert generate(model, prompts[:1], mode, **settings)[0] == together[0]
    assert generate(model, prompts[:5], mode, **settings) == together[:5]
    assert generate(model, prompts, mode, **(settings | {"seed": 5})) != together
    stopped = generate(model, prompts, mode, **settings, stop_ids=[together[3].tokens[2]])
    for short, whole in zip(stopped, together, strict=True):
        assert short.tokens == whole.tokens[: len(short.tokens)]


def test_equal_prompts_draw_differently_in_different_rows(model: FullBandModel) -> None:
    made = generate(model, random_prompts([5]) * 8, max_new_tokens=8, temperature=1.5)
    assert len({tuple(row.tokens) for row in made}) > 1


def test_stop_ids_end_a_row_and_only_it(model: FullBandModel) -> None:
    prompts = random_prompts([6, 11, 3, 6])
    whole = generate(model, prompts, max_new_tokens=10)
    stop = whole[1].tokens[4]
    stopped = generate(model, prompts, max_new_tokens=10, stop_ids=[stop])
    for short, full in zip(stopped, whole, strict=True):
        if stop in full.tokens:
            assert (short.tokens, short.finish_reason) == (full.tokens[: full.tokens.index(stop)], "stop")
        else:
            assert (short.tokens, short.finish_reason) == (full.tokens, "length")
    assert len({row.finish_reason for row in stopped}) == 2


def test_stream_gives_each_step_and_ends_when_all_rows_have(model: FullBandModel) -> None:
    prompts = random_prompts([6, 11])
    whole = generate(model, prompts, max_new_tokens=7)
    steps = list(stream(model, prompts, max_new_tokens=7))
    assert [[new.tokens[row] for new in steps] for row in range(2)] == [row.tokens for row in whole]
    assert [new.finished for new in steps] == [{}] * 6 + [{0: "length", 1: "length"}]
    first = {whole[0].tokens[0], whole[1].tokens[0]}
    (only,) = stream(model, prompts, max_new_tokens=7, stop_ids=first)
    assert (only.tokens, only.finished) == ({}, {0: "stop", 1: "stop"})


def test_streaming_leaves_gradients_on_for_its_reader(model: FullBandModel) -> None:
    for _ in stream(model, [[1, 2]], max_new_tokens=2):
        assert torch.is_grad_enabled()


def test_the_context_is_the_limit(model: FullBandModel) -> None:
    prompts = random_prompts([2, 40])
    assert len(generate(model, prompts, max_new_tokens=8)[1].tokens) == 8
    with pytest.raises(ValueError, match=r"prompt 1 has 40 tokens; with max_new_tokens=9 it exceeds .* 48 \(room for 8\)"):
        stream(model, prompts, max_new_tokens=9)  # before the first step is asked for
    with pytest.raises(ValueError, match="max_new_tokens must be 1 to"):
        generate(model, prompts, max_new_tokens=0)
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        generate(model, [[]], max_new_tokens=1)


def text_model() -> FullBandModel:
    torch.manual_seed(0)
    config = TrunkConfig(vocab_size=257, width=16, layers=1, heads=2, kv_heads=1, glu_width=16, context=64, window=8)
    return FullBandModel(config).eval()


def test_text_streams_whole_characters() -> None:
    model, tokenizer = text_model(), ByteTokenizer()
    pieces: list[str] = []
    settings = {"max_new_tokens": 40, "temperature": 1.0, "seed": 2}
    made = generate_text(model, tokenizer, "né", on_text=pieces.append, **settings)
    assert made.text == "".join(pieces) == tokenizer.decode(made.tokens)
    assert len(pieces) > 1
    assert made.tokens == generate(model, [tokenizer.encode("né")], stop_ids=tokenizer.stops, **settings)[0].tokens


class Parrot(ToyModel):
    """A trunk and model in one, whose most likely token is always the other of two."""

    context, vocab_size = 64, 257
    head_weight = torch.eye(257)

    def __init__(self, first: int, second: int):
        self.connect_itself()
        self.other = torch.zeros(257, 257)
        self.other[first, second] = self.other[second, first] = 1.0

    def embed(self, tokens_BT: Tensor) -> Tensor:
        return self.head_weight[tokens_BT]

    def __call__(self, inputs_BTD: Tensor, *past: object) -> tuple[Tensor, None]:
        return inputs_BTD @ self.other, None


def test_text_does_not_break_characters() -> None:
    tokenizer = ByteTokenizer()
    pieces: list[str] = []
    parrot = Parrot(*tokenizer.encode("é"))
    made = generate_text(parrot, tokenizer, "é", "standard", max_new_tokens=7, on_text=pieces.append)
    assert pieces == ["é", "é", "é", "\ufffd"]  # the seventh byte is half a character
    assert made.text == "ééé\ufffd" and made.finish_reason == "length"


def test_text_stops_at_the_tokenizers_end() -> None:
    model, tokenizer = text_model(), ByteTokenizer()
    whole = generate_text(model, tokenizer, "ab", max_new_tokens=5)
    stopped = generate_text(model, tokenizer, "ab", max_new_tokens=5, stop_ids={whole.tokens[0]})
    assert (stopped.text, stopped.tokens, stopped.finish_reason) == ("", [], "stop")
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        generate_text(model, tokenizer, "", max_new_tokens=5)
