"""Log-likelihoods under every reading: against the slow recurrence, over batches, over shared rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fullband.decode import generate
from fullband.evaluate.harness.scoring import MOST_SOFT_PASSES, Continuation, Reading, score_continuations
from fullband.feedback.passes import read
from fullband.model import FullBandModel

READINGS: tuple[Reading, ...] = (0, 1, 2, 3, "exact", "converged", "soft")


def requests() -> list[Continuation]:
    """Of many lengths; two share all inputs, and two of those split them elsewhere."""
    generator = torch.Generator().manual_seed(3)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(23, (count,), generator=generator).tolist())

    made = [Continuation(ids(1 + 3 * i % 11), ids(1 + i % 4)) for i in range(9)]
    shared = ids(6)
    return [*made, Continuation(shared, (1, 2)), Continuation(shared, (1, 3)), Continuation((*shared, 1), (4,))]


def reference(model: FullBandModel, request: Continuation, reading: Reading) -> float:
    """One row alone, without padding; Soft position by position from a plain context."""
    inputs = torch.tensor([(request.context + request.tokens)[:-1]])
    plain = torch.arange(inputs.shape[1])[None] < len(request.context)
    if reading == "soft":
        states = read(model, inputs, "exact", plain_BT=plain)
    else:
        states = read(model, inputs, inputs.shape[1] if reading == "converged" else reading)
    log_probabilities = F.log_softmax(model.logits(states[0, len(request.context) - 1 :]), dim=-1)
    return float(log_probabilities.gather(1, torch.tensor(request.tokens)[:, None]).sum())


@pytest.mark.parametrize("batch_rows", [1, 8])
def test_scores_equal_the_slow_reading(isometric_model: Callable[..., FullBandModel], batch_rows: int) -> None:
    model = isometric_model()
    asked = requests()
    found = score_continuations(model, asked, READINGS, batch_rows)
    for request, scores in zip(asked, found, strict=True):
        for reading in READINGS:
            tolerance = 0.05 if reading == "converged" else 1e-9
            assert scores[reading].log_likelihood == pytest.approx(reference(model, request, reading), abs=tolerance), (request, reading)
    differing = [scores for scores in found if scores[0].log_likelihood != scores[1].log_likelihood]
    assert len(differing) == len(asked) - sum(len(r.context) + len(r.tokens) == 2 for r in asked)


def test_long_continuations_in_soft_are_read_position_by_position(isometric_model: Callable[..., FullBandModel]) -> None:
    model = isometric_model()
    request = Continuation((1, 2, 3), tuple(i % 23 for i in range(MOST_SOFT_PASSES + 9)))
    [scores] = score_continuations(model, [request], ["soft"])
    assert scores["soft"].log_likelihood == pytest.approx(reference(model, request, "soft"), abs=1e-9)


@pytest.mark.parametrize(("mode", "reading"), [("standard", 0), ("soft", "soft"), ("fused", "exact")])
def test_what_a_mode_generates_greedily_is_greedy_in_its_reading(
    isometric_model: Callable[..., FullBandModel], mode: str, reading: Reading
) -> None:
    model = isometric_model()
    prompt = (4, 8, 15, 16)
    [made] = generate(model, [prompt], mode, "exact" if mode == "fused" else None, max_new_tokens=12)
    [scores] = score_continuations(model, [Continuation(prompt, tuple(made.tokens))], [reading])
    assert scores[reading].greedy
    [other] = score_continuations(model, [Continuation(prompt, (*made.tokens[:-1], (made.tokens[-1] + 1) % 23))], [reading])
    assert not other[reading].greedy


def test_what_does_not_fit_loses_its_beginning(isometric_model: Callable[..., FullBandModel]) -> None:
    model = isometric_model()
    long = Continuation(tuple(i % 23 for i in range(100)), (1, 2))
    cut = Continuation(long.context[-63:], (1, 2))
    [one], [other] = (score_continuations(model, [request], [1]) for request in (long, cut))
    assert one[1].log_likelihood == pytest.approx(other[1].log_likelihood, abs=1e-9)


def test_shared_inputs_are_read_once(isometric_model: Callable[..., FullBandModel]) -> None:
    model = isometric_model()
    rows = 0

    def count(trunk: torch.nn.Module, inputs: tuple[torch.Tensor, ...], outputs: object) -> None:
        nonlocal rows
        rows += inputs[0].shape[0]

    with_hook = model.trunk.register_forward_hook(count)
    score_continuations(model, [Continuation((1, 2, 3), (token,)) for token in range(5)], [0])
    with_hook.remove()
    assert rows == 1


@pytest.mark.parametrize(
    ("request_", "readings", "expected"),
    [
        (Continuation((1,), ()), [0], "a continuation has 1 to 64 tokens and a context before it, not 0"),
        (Continuation((), (1,)), [0], "a continuation has 1 to 64 tokens"),
        (Continuation((1,), (1,) * 65), [0], "not 65"),
        (Continuation((1,), (1,)), [-1], "feedback_passes is 0, 1, 2"),
    ],
)
def test_bad_requests(
    isometric_model: Callable[..., FullBandModel], request_: Continuation, readings: list[Reading], expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        score_continuations(isometric_model(), [request_], readings)
