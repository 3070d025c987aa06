"""Generation step by step: samples, keys, limits, processors, sliding, cancelling, continuing from a state."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.cases import CONTEXT, VOCABULARY, padded, random_prompts
from fullband.decode import Completion, TextSoFar, collect, generate, prefill, resolve_mode, stream, stream_from
from fullband.model import FullBandModel
from reference.decoding import reference_tops
from reference.sampling import reference_distribution
from reference.sliding import reference_sliding_greedy

MODES: list[tuple[str, int | str | None]] = [("standard", None), ("soft", None), ("fused", 2), ("fused", "exact")]
every_mode = pytest.mark.parametrize(("mode", "passes"), MODES, ids=str)
DRAWN: dict[str, Any] = {"temperature": 3.0, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 4}

SHORT = 10  # a context that is soon full


@pytest.fixture
def short_model(isometric_model: Callable[..., FullBandModel]) -> FullBandModel:
    return isometric_model(vocab_size=VOCABULARY, window=4, context=SHORT)


# Samples and keys


@every_mode
@pytest.mark.parametrize("lengths", [[7, 7], [6, 11, 1]], ids=["even", "ragged"])
def test_n_samples_of_a_prompt_read_once(model: FullBandModel, mode: str, passes: int | str | None, lengths: list[int]) -> None:
    prompts = random_prompts(lengths)
    made = generate(model, prompts, mode, passes, max_new_tokens=8, n=3, **DRAWN)
    assert len(made) == 3 * len(prompts)
    assert len({tuple(row.tokens) for row in made}) == len(made)
    for number, prompt in enumerate(prompts):
        alone = generate(model, [prompt], mode, passes, max_new_tokens=8, n=3, keys=[number], **DRAWN)
        assert alone == made[3 * number : 3 * number + 3]
        # sample s is the same however many there are, and whether the prompt was read once or not
        assert generate(model, [prompt], mode, passes, max_new_tokens=8, keys=[number], **DRAWN) == alone[:1]
        assert generate(model, [prompt], mode, passes, max_new_tokens=8, n=2, keys=[number], **DRAWN) == alone[:2]


def test_greedy_samples_are_equal(model: FullBandModel) -> None:
    made = generate(model, random_prompts([4, 9]), max_new_tokens=5, n=2)
    assert made[0] == made[1] and made[2] == made[3]


def test_same_seed_same_text_in_any_batch_and_any_order(model: FullBandModel) -> None:
    prompts = random_prompts([6, 11, 3, 6, 19, 1, 8, 14])
    settings: dict[str, Any] = {"max_new_tokens": 10} | DRAWN
    together = generate(model, prompts, **settings)
    for order in ([7, 6, 5, 4, 3, 2, 1, 0], [3, 0, 6], [5]):
        assert generate(model, [prompts[row] for row in order], keys=order, **settings) == [together[row] for row in order]
    assert generate(model, prompts, **(settings | {"seed": 5})) != together


# Limits


def test_each_row_has_its_own_limit(model: FullBandModel) -> None:
    prompts = random_prompts([3, 9, 20])
    whole = generate(model, prompts, max_new_tokens=25)
    for settings, lengths in (
        ({"max_length": 24}, [21, 15, 4]),
        ({"max_length": 24, "max_new_tokens": 16}, [16, 15, 4]),
        ({"max_length": 25}, [22, 16, 5]),
    ):
        made = generate(model, prompts, **settings)
        assert [row.tokens for row in made] == [row.tokens[:length] for row, length in zip(whole, lengths, strict=True)]
        assert {row.finish_reason for row in made} == {"length"}
    assert [len(row.tokens) for row in generate(model, prompts)] == [CONTEXT - 3, CONTEXT - 9, CONTEXT - 20]  # as far as there is room


def test_a_stop_id_cannot_come_before_the_minimum(model: FullBandModel) -> None:
    prompts = random_prompts([6, 11, 3])
    whole = generate(model, prompts, max_new_tokens=12)
    stops = {whole[0].tokens[0], whole[1].tokens[2]}
    for least in (1, 5, 12):
        made = generate(model, prompts, max_new_tokens=12, min_new_tokens=least, stop_ids=stops)
        assert all(least <= len(row.tokens) <= 12 for row in made)
        assert not any(stops & set(row.tokens) for row in made)
    assert min(len(row.tokens) for row in generate(model, prompts, max_new_tokens=12, stop_ids=stops)) == 0


# What looks back at the text


def test_the_penalty_covers_prompt_and_new_tokens(model: FullBandModel) -> None:
    prompts = random_prompts([5, 12])
    for row, prompt in zip(generate(model, prompts, max_new_tokens=10, repetition_penalty=3.0), prompts, strict=True):
        for number, top in enumerate(reference_tops(model, prompt, row.tokens[:-1], 0, True)):
            expected = reference_distribution(model.trunk.head(top).tolist(), {*prompt, *row.tokens[:number]}, repetition_penalty=3.0)
            assert row.tokens[number] == expected.index(max(expected))


@pytest.mark.parametrize("n", [1, 2])
def test_processors_see_the_text_and_change_the_logits(model: FullBandModel, n: int) -> None:
    prompts = random_prompts([5, 3])
    seen: list[TextSoFar] = []

    def only_above_the_last(logits_NV: Tensor, so_far: TextSoFar) -> Tensor:
        seen.append(TextSoFar(so_far.rows_N, so_far.tokens_NT.clone(), so_far.made))
        return logits_NV.masked_fill(torch.arange(VOCABULARY)[None] < so_far.tokens_NT[:, -1:], -torch.inf)

    def never_an_odd_one(logits_NV: Tensor, _: TextSoFar) -> Tensor:
        return logits_NV.masked_fill(torch.arange(VOCABULARY) % 2 == 1, -torch.inf)

    def stop_at_28(logits_NV: Tensor, so_far: TextSoFar) -> Tensor:
        assert logits_NV.shape == (len(so_far.rows_N), VOCABULARY)
        return logits_NV

    made = generate(
        model,
        prompts,
        max_new_tokens=6,
        n=n,
        processors=[only_above_the_last, never_an_odd_one, stop_at_28],
        stop_ids=[28],
        temperature=2.0,
    )
    for row, prompt in zip(made, [prompt for prompt in prompts for _ in range(n)], strict=True):
        text = [prompt[-1], *row.tokens]
        assert text == sorted(text) and not any(token % 2 for token in row.tokens)
    for so_far in seen:
        for number, tokens in zip(so_far.rows_N.tolist(), so_far.tokens_NT.tolist(), strict=True):
            text = prompts[number // n] + made[number].tokens[: so_far.made]
            assert [token for token in tokens if token >= 0] == text and tokens[len(tokens) - len(text) :] == text


def test_a_processor_that_leaves_nothing_is_named_by_row(model: FullBandModel) -> None:
    def nothing(logits_NV: Tensor, so_far: TextSoFar) -> Tensor:
        return logits_NV.masked_fill((so_far.rows_N == 1)[:, None], -torch.inf) if so_far.made == 2 else logits_NV

    for settings in ({}, DRAWN):
        steps = stream(model, random_prompts([3, 4, 5]), max_new_tokens=6, processors=[nothing], **settings)
        assert len([next(steps), next(steps)]) == 2
        with pytest.raises(ValueError, match="row 1 has no token to choose"):
            next(steps)
        assert list(steps) == []
    with pytest.raises(ValueError, match=r"made \[3, 28\] of logits \[3, 29\]"):
        generate(model, random_prompts([3, 4, 5]), max_new_tokens=6, processors=[lambda logits_NV, _: logits_NV[:, 1:]])


# Sliding


@every_mode
def test_a_row_that_slides_reads_its_last_half_again(short_model: FullBandModel, mode: str, passes: int | str | None) -> None:
    """Two slides or three; rows fill the context at different steps, one prompt is longer than it, two slide together."""
    prompts = random_prompts([4, 7, SHORT, SHORT + 13, 7])
    resolved = resolve_mode(mode, passes)
    made = generate(short_model, prompts, mode, passes, max_new_tokens=16, overflow="slide", chunk=3)
    for row, prompt in zip(made, prompts, strict=True):
        assert row.tokens == reference_sliding_greedy(short_model, prompt, 16, resolved.feedback_passes, resolved.feeds_back)
        assert row.finish_reason == "length"


def test_sliding_rows_do_not_depend_on_their_neighbours(short_model: FullBandModel) -> None:
    prompts = random_prompts([8, 4, 5, 9])
    settings: dict[str, Any] = {"max_new_tokens": 20, "overflow": "slide"} | DRAWN
    together = generate(short_model, prompts, n=2, **settings)
    stop = together[4].tokens[9]
    stopped = generate(short_model, prompts, n=2, stop_ids=[stop], **settings)
    assert len({len(row.tokens) for row in stopped}) > 2  # rows leave before and after they slide
    for number, prompt in enumerate(prompts):
        alone = generate(short_model, [prompt], keys=[number], n=2, stop_ids=[stop], **settings)
        assert alone == stopped[2 * number : 2 * number + 2]
        for short, whole in zip(alone, together[2 * number : 2 * number + 2], strict=True):
            assert short.tokens == whole.tokens[: len(short.tokens)]


def test_what_fits_does_not_slide(short_model: FullBandModel) -> None:
    prompts = random_prompts([3, 6])
    assert generate(short_model, prompts, max_new_tokens=4, overflow="slide") == generate(short_model, prompts, max_new_tokens=4)


# Continuing from a state


@every_mode
@pytest.mark.parametrize("lengths", [[4], [2, 4, 5]], ids=["one", "ragged"])
def test_continuations_of_one_state_equal_separate_prefill(
    short_model: FullBandModel, mode: str, passes: int | str | None, lengths: list[int]
) -> None:
    prompts = random_prompts(lengths)
    state = prefill(short_model, prompts, resolve_mode(mode, passes).feedback_passes, chunk=3)
    many: list[dict[str, Any]] = [
        {"max_new_tokens": 5},
        {"max_new_tokens": 5, "n": 3} | DRAWN,
        {"max_length": SHORT - 1, "n": 2, "stop_ids": [3, 7]} | DRAWN | {"seed": 1},
        {"max_new_tokens": 12, "overflow": "slide"},
    ]
    streams = [stream_from(short_model, state, mode, passes, prompts=prompts, **settings) for settings in many]
    parts = [list(itertools.islice(steps, 3)) for steps in streams]  # in turns: neither may write into the other's keys
    for settings, steps, first in zip(many, streams, parts, strict=True):
        assert first + list(steps) == list(stream(short_model, prompts, mode, passes, **settings))
    tokens, mask = padded(prompts, "right")
    assert (
        list(stream_from(short_model, state, mode, passes, prompts=tokens, mask=mask, **many[1]))
        == parts[1] + list(stream(short_model, prompts, mode, passes, **many[1]))[3:]
    )


def test_a_state_goes_on_without_its_text(model: FullBandModel) -> None:
    prompts = random_prompts([5, 8])
    state = prefill(model, prompts)
    assert collect(stream_from(model, state, max_new_tokens=6, n=2)) == generate(model, prompts, max_new_tokens=6, n=2)
    widths: list[int] = []

    def widen(logits_NV: Tensor, so_far: TextSoFar) -> Tensor:
        widths.append(so_far.tokens_NT.shape[1])
        return logits_NV

    collect(stream_from(model, state, max_new_tokens=3, processors=[widen]))
    assert widths == [0, 1, 2]  # new tokens only


def test_one_state_many_modes(model: FullBandModel) -> None:
    """Standard and Soft read a prompt alike: one reading serves both."""
    prompts = random_prompts([9])
    state = prefill(model, prompts)
    for mode in ("standard", "soft"):
        assert collect(stream_from(model, state, mode, max_new_tokens=8)) == generate(model, prompts, mode, max_new_tokens=8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty looks back"),
        ({"overflow": "slide"}, "overflow='slide' looks back"),
        ({"prompts": [[1, 2], [3, 4]]}, r"the state is of prompts of \[2, 3\] tokens, the prompts have \[2, 2\]"),
        ({"max_new_tokens": CONTEXT}, "exceeds the model's context"),
    ],
)
def test_what_a_state_cannot_do(model: FullBandModel, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stream_from(model, prefill(model, [[1, 2], [3, 4, 5]]), **({"max_new_tokens": 4} | settings))


# Ending early


@pytest.mark.parametrize("kind", ["function", "event"])
def test_cancelling_ends_every_row_with_what_it_has(model: FullBandModel, kind: str) -> None:
    prompts = random_prompts([5, 9])
    whole = generate(model, prompts, max_new_tokens=10)
    event = threading.Event()
    steps = stream(model, prompts, max_new_tokens=10, cancelled=event if kind == "event" else event.is_set)
    made = [next(steps) for _ in range(4)]
    event.set()
    made += list(steps)
    assert [new.finished for new in made] == [{}] * 4 + [{0: "cancelled", 1: "cancelled"}] and made[-1].tokens == {}
    assert [[new.tokens[row] for new in made[:-1]] for row in range(2)] == [row.tokens[:4] for row in whole]
    assert generate(model, prompts, max_new_tokens=10, cancelled=lambda: True) == [Completion([], "cancelled")] * 2


def test_dropped_rows_leave_and_the_others_go_on(model: FullBandModel) -> None:
    prompts = random_prompts([5, 9, 2, 7])
    whole = generate(model, prompts, max_new_tokens=8, **DRAWN)
    steps = stream(model, prompts, max_new_tokens=8, **DRAWN)
    next(steps), next(steps)
    steps.drop([0, 2])
    assert steps.rows == 2
    rest = list(steps)
    assert [[new.tokens[row] for new in rest] for row in (1, 3)] == [whole[row].tokens[2:] for row in (1, 3)]
    assert rest[-1].finished == {1: "length", 3: "length"}
    steps = stream(model, prompts, max_new_tokens=8)
    next(steps)
    steps.drop(range(4))
    assert list(steps) == []


def test_closing_a_stream_frees_what_it_holds(model: FullBandModel) -> None:
    steps = stream(model, random_prompts([5, 9]), max_new_tokens=8)
    next(steps)
    rows = weakref.ref(steps._batch)
    steps.close()
    gc.collect()
    assert rows() is None and list(steps) == []
    steps.close()


# Bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"n": 0}, "n, the samples of each prompt, must be 1 to 65536, got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be 1 to"),
        ({"max_length": 1}, "max_length counts the prompt"),
        ({"max_length": 5}, "prompt 1 has 5 tokens; max_length=5 leaves no room"),
        ({"max_length": CONTEXT + 1, "max_new_tokens": None}, r"with max_length=49 it exceeds the model's context of 48 \(room for 46\)"),
        ({"min_new_tokens": -1}, "min_new_tokens is at least 0"),
        ({"min_new_tokens": 7}, "prompt 0 makes at most 6 tokens, fewer than min_new_tokens=7"),
        ({"stop_ids": [3, VOCABULARY]}, r"stop id 29 is outside 0\.\.28"),
        ({"stop_ids": [-1]}, "stop id -1"),
        ({"keys": [1]}, "1 keys for 2 prompts"),
        ({"keys": [1, -2]}, "keys are integers ≥ 0"),
        ({"overflow": "wrap"}, "unknown overflow 'wrap'"),
        ({"overflow": "slide", "max_new_tokens": None}, "no end of its own"),
        ({"chunk": 0}, "at least one position"),
        ({"feedback_passes": 1}, "needs the mode fused"),
    ],
)
def test_bad_settings_are_one_line(model: FullBandModel, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        stream(model, [[1, 2], [1, 2, 3, 4, 5]], **({"max_new_tokens": 6} | settings))
    assert "\n" not in str(error.value)


def test_a_full_context_has_no_room(model: FullBandModel) -> None:
    with pytest.raises(ValueError, match=r"prompt 0 has 48 tokens; with at least one new token it exceeds .* \(room for 0\)"):
        generate(model, random_prompts([CONTEXT]))
    with pytest.raises(ValueError, match="token id 29"):
        generate(model, [[1, 29]], max_new_tokens=3)
    with pytest.raises(TypeError, match="topp"):
        generate(model, [[1, 2]], max_new_tokens=3, topp=0.9)  # type: ignore[call-arg]
