"""Log-likelihoods under every scoring: against the slow recurrence, over batches, over shared beginnings."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fullband.decode import generate
from fullband.evaluate.harness import sharing
from fullband.evaluate.harness.scoring import Continuation, score_continuations
from fullband.evaluate.harness.sharing import examples_of, group_examples
from fullband.evaluate.harness.states import Scoring
from fullband.model import FullBandModel
from fullband.trunk.residual import runs_watched
from hf.models import FAMILIES, shared
from reference.seam import read

SCORINGS: tuple[Scoring, ...] = (0, 1, 2, 3, "exact", "converged", "soft")


def requests() -> list[Continuation]:
    """Of many lengths; two share all inputs, and two of those split them elsewhere."""
    generator = torch.Generator().manual_seed(3)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(23, (count,), generator=generator).tolist())

    made = [Continuation(ids(1 + 3 * i % 11), ids(1 + i % 4)) for i in range(9)]
    shared = ids(6)
    return [*made, Continuation(shared, (1, 2)), Continuation(shared, (1, 3)), Continuation((*shared, 1), (4,))]


@torch.no_grad()
def reference(model: FullBandModel, request: Continuation, scoring: Scoring) -> float:
    """One row alone, without padding; Soft position by position from a plain context."""
    inputs = torch.tensor([(request.context + request.tokens)[:-1]])
    plain = torch.arange(inputs.shape[1])[None] < len(request.context)
    if scoring == "soft":
        states = read(model, inputs, "exact", plain_BT=plain)
    else:
        states = read(model, inputs, inputs.shape[1] if scoring == "converged" else scoring)
    log_probabilities = F.log_softmax(model.trunk.head(states[0, len(request.context) - 1 :]), dim=-1)
    return float(log_probabilities.gather(1, torch.tensor(request.tokens)[:, None]).sum())


@pytest.mark.parametrize("batch_rows", [1, 8])
def test_scores_equal_the_slow_recurrence(isometric_model: Callable[..., FullBandModel], batch_rows: int) -> None:
    model = isometric_model()
    asked = requests()
    found = score_continuations(model, asked, SCORINGS, batch_rows)
    for request, scores in zip(asked, found, strict=True):
        for scoring in SCORINGS:
            tolerance = 0.05 if scoring == "converged" else 1e-9
            assert scores[scoring].log_likelihood == pytest.approx(known(model, request, scoring), abs=tolerance), (request, scoring)
    differing = [scores for scores in found if scores[0].log_likelihood != scores[1].log_likelihood]
    assert len(differing) == len(asked) - sum(len(r.context) + len(r.tokens) == 2 for r in asked)


KNOWN: dict[tuple[Continuation, Scoring], float] = {}


def known(model: FullBandModel, request: Continuation, scoring: Scoring) -> float:
    """The reference of the default `isometric_model()`, which is the same in all tests; computed once for each request."""
    if (request, scoring) not in KNOWN:
        KNOWN[request, scoring] = reference(model, request, scoring)
    return KNOWN[request, scoring]


def questions() -> list[Continuation]:
    """What shares a beginning: choices of a question, one of them long; contexts that differ in an option and go on alike; questions behind
    common examples, of which one is a choice's only one; and a question at the model's limit of 64. Beginnings differ in length."""
    generator = torch.Generator().manual_seed(5)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(23, (count,), generator=generator).tolist())

    question, sentence, examples, limit = ids(40), ids(30), ids(44), ids(60)
    return [
        *(Continuation(question, ids(n)) for n in (1, 3, 3, 20)),
        *(Continuation((*sentence, *option, 1, 2), (3, 4, 5)) for option in ((6, 7), (8,), (9, 9, 9))),
        *(Continuation((*examples, *ids(n)), ids(2)) for n in (5, 9, 2)),
        *(Continuation(limit, ids(4)) for _ in range(3)),
        Continuation((7,), (8, 9)),
    ]


@pytest.mark.parametrize(
    "batch_rows", [3, 32, *(pytest.param(n, marks=[pytest.mark.slow, pytest.mark.xdist_group("scoring")]) for n in (2, 8))]
)
def test_a_common_beginning_is_run_once_and_changes_nothing(
    isometric_model: Callable[..., FullBandModel], batch_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "LEAST_SAVED", 1)
    model, asked = isometric_model(), questions()
    examples = examples_of([(request.context + request.tokens[:-1], len(request.context)) for request in asked])
    groups = [group for group in group_examples(examples, batch_rows) if group.shared]
    assert len(groups) >= 4 and len({group.shared for group in groups}) >= 4, groups
    found = score_continuations(model, asked, SCORINGS, batch_rows)
    for request, scores in zip(asked, found, strict=True):
        for scoring in SCORINGS:
            tolerance = 0.05 if scoring == "converged" else 1e-9
            assert scores[scoring].log_likelihood == pytest.approx(known(model, request, scoring), abs=tolerance), (request, scoring)


@pytest.mark.parametrize("scoring", ["soft", "exact", 2])
def test_one_scoring_alone_shares_beginnings_too(isometric_model: Callable[..., FullBandModel], scoring: Scoring) -> None:
    model, asked = isometric_model(), questions()
    for request, scores in zip(asked, score_continuations(model, asked, [scoring]), strict=True):
        assert scores[scoring].log_likelihood == pytest.approx(known(model, request, scoring), abs=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_beginnings_are_shared_on_every_kind_of_trunk(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full attention, sliding windows, recurrent layers; padded beginnings."""
    monkeypatch.setattr(sharing, "LEAST_SAVED", 1)
    model = shared(family)
    begin = [tuple(range(2, 2 + n)) for n in (9, 6)]
    asked = [Continuation(beginning, tokens) for beginning in begin for tokens in ((1, 2), (3, 1, 4, 1), (5, 5, 2))]
    made = examples_of([(request.context + request.tokens[:-1], len(request.context)) for request in asked])
    assert [(group.shared, len(group.examples)) for group in group_examples(made, 3)] == [(5, 3), (8, 3)]
    wanted: list[Scoring] = [0, 2, "soft"]
    for request, scores in zip(asked, score_continuations(model, asked, wanted, 6), strict=True):
        for scoring in wanted:
            assert scores[scoring].log_likelihood == pytest.approx(reference(model, request, scoring), abs=1e-5), scoring


def test_fewer_positions_are_read(isometric_model: Callable[..., FullBandModel]) -> None:
    model = isometric_model()
    read_ = {1: 0, 8: 0}
    for batch_rows in read_:

        def count(x: torch.Tensor, batch_rows: int = batch_rows) -> None:
            read_[batch_rows] += x.shape[0] * x.shape[1]

        with runs_watched(model.trunk, count):
            score_continuations(model, [Continuation(tuple(range(20)) * 2, (token, 1, 2)) for token in range(4)], [0, 1], batch_rows)
    assert read_ == {1: 2 * 4 * 42, 8: 2 * (39 + 4 * 3)}


def test_soft_reads_a_context_once_and_the_continuation_position_by_position(isometric_model: Callable[..., FullBandModel]) -> None:
    model = isometric_model()
    widths = []
    with runs_watched(model.trunk, lambda x: widths.append(x.shape[1])):
        score_continuations(model, [Continuation(tuple(range(20)), (1, 2, 3, 4))], ["soft"])
    assert widths == [19, 1, 1, 1, 1]  # the context's last token begins the scored part


def test_groups_are_a_partition_that_saves_positions() -> None:
    generator = torch.Generator().manual_seed(1)
    beginnings = [tuple(torch.randint(3, (n,), generator=generator).tolist()) for n in (80, 70, 30, 3)]
    made = examples_of(
        [
            ((*beginning, *torch.randint(3, (n,), generator=generator).tolist()), len(beginning) + n - 2)
            for beginning in beginnings
            for n in (2, 3, 5, 8, 13)
        ]
    )
    for most in (1, 2, 4, 100):
        every = group_examples(made, most)
        assert sorted(id(example) for group in every for example in group.examples) == sorted(map(id, made))
        groups = [group for group in every if group.shared]
        assert all(len(group.examples) == 1 for group in every if not group.shared)
        for group in groups:
            assert 2 <= len(group.examples) <= most and group.saved >= sharing.LEAST_SAVED
            assert len({example.inputs[: group.shared] for example in group.examples}) == 1
            assert all(0 < group.shared < example.start for example in group.examples)
        assert (not groups) == (most == 1)
        batches = list(sharing.batches_of(every, most))
        assert all(sum(len(group.examples) for group in batch) <= most for batch in batches)
        assert all(len({group.shared > 0 for group in batch}) == 1 for batch in batches)
        assert sum(len(batch) for batch in batches) == len(every)


def test_soft_without_a_cache_to_step_from(isometric_model: Callable[..., FullBandModel]) -> None:
    model = isometric_model()
    model.trunk.supports_prefix_reuse = False
    asked = requests()[:6]
    for request, scores in zip(asked, score_continuations(model, asked, ["soft", 1]), strict=True):
        for scoring, score in scores.items():
            assert score.log_likelihood == pytest.approx(reference(model, request, scoring), abs=1e-9), scoring


def test_long_continuations_in_soft_are_read_position_by_position(isometric_model: Callable[..., FullBandModel]) -> None:
    model = isometric_model()
    request = Continuation((1, 2, 3), tuple(i % 23 for i in range(25)))
    [scores] = score_continuations(model, [request], ["soft"])
    assert scores["soft"].log_likelihood == pytest.approx(reference(model, request, "soft"), abs=1e-9)


@pytest.mark.parametrize(("mode", "scoring"), [("standard", 0), ("soft", "soft"), ("fused", "exact")])
def test_what_a_mode_generates_greedily_is_greedy_in_its_reading(
    isometric_model: Callable[..., FullBandModel], mode: str, scoring: Scoring
) -> None:
    model = isometric_model()
    prompt = (4, 8, 15, 16)
    [made] = generate(model, [prompt], mode, "exact" if mode == "fused" else None, max_new_tokens=12)
    [scores] = score_continuations(model, [Continuation(prompt, tuple(made.tokens))], [scoring])
    assert scores[scoring].greedy
    [other] = score_continuations(model, [Continuation(prompt, (*made.tokens[:-1], (made.tokens[-1] + 1) % 23))], [scoring])
    assert not other[scoring].greedy


def test_what_does_not_fit_loses_its_beginning(isometric_model: Callable[..., FullBandModel]) -> None:
    model = isometric_model()
    long = Continuation(tuple(i % 23 for i in range(100)), (1, 2))
    cut = Continuation(long.context[-63:], (1, 2))
    [one], [other] = (score_continuations(model, [request], [1]) for request in (long, cut))
    assert one[1].log_likelihood == pytest.approx(other[1].log_likelihood, abs=1e-9)


def test_shared_inputs_are_read_once(isometric_model: Callable[..., FullBandModel]) -> None:
    model = isometric_model()
    count_ = 0

    def count(x: torch.Tensor) -> None:
        nonlocal count_
        count_ += x.shape[0]

    with runs_watched(model.trunk, count):
        score_continuations(model, [Continuation((1, 2, 3), (token,)) for token in range(5)], [0])
    assert count_ == 1


@pytest.mark.parametrize(
    ("request_", "scorings", "expected"),
    [
        (Continuation((1,), ()), [0], "a continuation has 1 to 64 tokens and a context before it, not 0"),
        (Continuation((), (1,)), [0], "a continuation has 1 to 64 tokens"),
        (Continuation((1,), (1,) * 65), [0], "not 65"),
        (Continuation((1,), (1,)), [-1], "feedback_passes is 0, 1, 2"),
    ],
)
def test_bad_requests(
    isometric_model: Callable[..., FullBandModel], request_: Continuation, scorings: list[Scoring], expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        score_continuations(isometric_model(), [request_], scorings)
