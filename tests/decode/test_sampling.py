"""From logits to tokens: the filters against a slow twin and against transformers, the draws against the stated distribution."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fullband.decode.sampling import (
    Sampler,
    SamplingOptions,
    draw,
    filter_logits,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalize_repetition,
    row_uniforms,
)
from reference.sampling import reference_distribution

FILTERS: dict[str, dict[str, Any]] = {
    "cold": {"temperature": 0.5},
    "plain": {"temperature": 1.0},
    "hot": {"temperature": 2.0},
    "top-k": {"temperature": 1.0, "top_k": 4},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "min-p": {"temperature": 1.0, "min_p": 0.1},
    "penalty": {"temperature": 1.0, "repetition_penalty": 1.7},
    "reward": {"temperature": 1.0, "repetition_penalty": 0.6},
    "all": {"temperature": 1.4, "top_k": 10, "top_p": 0.9, "min_p": 0.12, "repetition_penalty": 1.3},
}
every_filter = pytest.mark.parametrize("settings", FILTERS.values(), ids=FILTERS)
LOGITS = [2.0, 1.0, 0.5, 0.1, -0.5, -1.0, -1.5, -2.0, 1.6, 0.3, -0.2, -3.0]
SEEN = {0, 3, 5, 10}  # logits above and below 0


def rows_with_keys(count: int) -> list[tuple[int, int]]:
    return [(row, 0) for row in range(count)]


def seen_mask(seen: set[int], size: int) -> torch.Tensor:
    return torch.tensor([[token in seen for token in range(size)]])


def filtered(logits_NV: torch.Tensor, seen_NV: torch.Tensor, options: SamplingOptions) -> torch.Tensor:
    return filter_logits(penalize_repetition(logits_NV, seen_NV, options.repetition_penalty), options)


def test_greedy_takes_the_most_likely() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, -1.0, 1.0]])
    assert Sampler(SamplingOptions(top_k=1), rows_with_keys(2), 5)(logits, torch.arange(2), 0).tolist() == [1, 0]


@every_filter
def test_20_000_draws_follow_the_stated_distribution(settings: dict[str, Any]) -> None:
    """Chi-square below the 99.9% point (Wilson and Hilferty's approximation); what is filtered out is never drawn."""
    rows, steps = 100, 200
    options = SamplingOptions(**settings, seed=3)
    sampler = Sampler(options, rows_with_keys(rows), steps)
    logits = penalize_repetition(torch.tensor([LOGITS]), seen_mask(SEEN, len(LOGITS)), options.repetition_penalty).expand(rows, -1)
    drawn = torch.stack([sampler(logits, torch.arange(rows), step) for step in range(steps)])
    observed = torch.bincount(drawn.flatten(), minlength=len(LOGITS)).double()
    expected = rows * steps * torch.tensor(reference_distribution(LOGITS, SEEN, **settings), dtype=torch.float64)
    possible = expected > 0
    assert observed.sum() == 20_000 and not observed[~possible].any()
    freedom = int(possible.sum()) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    assert ((observed - expected).square() / expected)[possible].sum() < limit


@every_filter
def test_filters_equal_the_slow_twin(settings: dict[str, Any]) -> None:
    logits = 2 * torch.randn(20, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    seen = torch.rand(20, 40, generator=torch.Generator().manual_seed(1)) < 0.3
    ours = torch.softmax(filtered(logits, seen, SamplingOptions(**settings)), -1)
    for row, row_seen, probabilities in zip(logits, seen, ours, strict=True):
        expected = reference_distribution(row.tolist(), set(row_seen.nonzero()[:, 0].tolist()), **settings)
        torch.testing.assert_close(probabilities, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-14)


@every_filter
@pytest.mark.parametrize("vocabulary", [50, 3000])  # 3000: top-p looks at the most likely first
def test_filters_equal_those_of_transformers(settings: dict[str, Any], vocabulary: int) -> None:
    process = pytest.importorskip("transformers.generation.logits_process")
    options = SamplingOptions(**settings)
    theirs = [process.RepetitionPenaltyLogitsProcessor(options.repetition_penalty), process.TemperatureLogitsWarper(options.temperature)]
    theirs += [process.TopKLogitsWarper(options.top_k)] if options.top_k else []
    theirs += [process.TopPLogitsWarper(options.top_p)] if options.top_p < 1 else []
    theirs += [process.MinPLogitsWarper(options.min_p)] if options.min_p else []
    for seed, spread in enumerate((0.1, 1.0, 4.0)):
        generator = torch.Generator().manual_seed(seed)
        logits = spread * torch.randn(7, vocabulary, generator=generator, dtype=torch.float64)
        ids = torch.randint(vocabulary, (7, 30), generator=generator)
        seen = torch.zeros(7, vocabulary, dtype=torch.bool).scatter_(1, ids, True)
        torch.testing.assert_close(filtered(logits, seen, options), process.LogitsProcessorList(theirs)(ids, logits), rtol=1e-12, atol=0)


def test_filters_change_nothing_they_were_given_and_keep_at_least_one_token() -> None:
    logits = torch.randn(5, 2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given = logits.clone()
    for left in (keep_top_k(logits, 1), keep_top_p(logits, 1e-9), keep_min_p(logits, 1 - 1e-12)):
        assert ((left > -torch.inf).sum(-1) == 1).all() and torch.equal(left.argmax(-1), logits.argmax(-1))
    assert torch.equal(keep_top_k(logits, 5000), logits)
    penalize_repetition(logits, torch.ones(5, 2000, dtype=torch.bool), 2.0)
    assert torch.equal(logits, given)


def test_equally_likely_tokens_stay_or_go_together() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0, 1.0]], dtype=torch.float64)
    expected = torch.tensor([[True, True, True, False, True]])
    assert torch.equal(keep_top_k(logits, 2) > -torch.inf, expected)
    assert torch.equal(keep_top_p(logits, 0.6) > -torch.inf, expected)


def test_top_p_of_a_flat_distribution_looks_further_than_the_most_likely() -> None:
    logits = torch.linspace(0, 0.1, 5000, dtype=torch.float64)[None]
    for top_p in (0.1, 0.5, 0.99):
        expected = reference_distribution(logits[0].tolist(), top_p=top_p)
        assert int((keep_top_p(logits, top_p) > -torch.inf).sum()) == sum(p > 0 for p in expected)


def test_a_row_is_filtered_alone_as_in_company() -> None:
    """One row's nucleus lies among the 1024 most likely tokens, the other's does not."""
    logits = torch.stack([torch.linspace(0, 40, 3000), torch.zeros(3000).index_fill(0, torch.tensor([7]), 0.1)]).double()
    together = keep_top_p(logits, 0.9)
    assert torch.equal(together, torch.cat([keep_top_p(logits[:1], 0.9), keep_top_p(logits[1:], 0.9)]))


def test_a_row_draws_alone_what_it_draws_in_company() -> None:
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    options = SamplingOptions(temperature=1.0, seed=5)
    together, alone = Sampler(options, rows_with_keys(8), 10), Sampler(options, [(6, 0)], 3)
    for step in range(3):
        assert together(logits, torch.arange(8), step)[6] == alone(logits[6:7], torch.tensor([0]), step)[0]
    remaining = torch.tensor([6, 2])  # the others have finished
    assert torch.equal(together(logits[remaining], remaining, 4), together(logits, torch.arange(8), 4)[remaining])


def test_streams_differ_by_seed_prompt_and_sample_and_not_by_length() -> None:
    keys = [(prompt, sample) for prompt in range(3) for sample in range(3)]
    numbers = row_uniforms(1, keys, 10)
    assert len(numbers.flatten().unique()) == 90
    assert torch.equal(row_uniforms(1, keys, 4), numbers[:, :4])
    assert not torch.equal(row_uniforms(2, keys, 10), numbers)


def test_the_edges_of_the_distribution() -> None:
    """A token of probability zero is never drawn, even by the smallest and the largest uniform number."""
    scores = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]], dtype=torch.float64).expand(2, -1)
    assert draw(scores, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)).tolist() == [1, 3]
    many = torch.zeros(1, 100_003)  # float32: the last cumulative probability is not 1
    assert 0 <= int(draw(many, torch.tensor([1 - 2**-53], dtype=torch.float64))) < 100_003


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, FILTERS["all"]], ids=["greedy", "draw", "all filters"])
def test_where_nothing_can_be_chosen_the_token_is_minus_one(settings: dict[str, Any]) -> None:
    nothing, nan = torch.full((5,), -torch.inf), torch.tensor([0.0, torch.nan, 1.0, 2.0, 3.0])
    sampler = Sampler(SamplingOptions(**settings), rows_with_keys(3), 1)
    assert sampler(torch.stack([nothing, nan, nothing.index_fill(0, torch.tensor([2]), 1.0)]), torch.arange(3), 0).tolist() == [-1, -1, 2]


def test_a_tiny_temperature_is_greedy() -> None:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(1))
    assert torch.equal(Sampler(SamplingOptions(temperature=1e-6), rows_with_keys(4), 1)(logits, torch.arange(4), 0), logits.argmax(-1))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-0.1, float("nan"), float("inf"))),
        *(("top_k", value) for value in (0, -1)),
        *(("top_p", value) for value in (0, -0.1, 1.1, float("nan"))),
        *(("min_p", value) for value in (-0.1, 1.0, float("nan"))),
        *(("repetition_penalty", value) for value in (0, -1.0, float("inf"), float("nan"))),
        ("seed", -1),
    ],
)
def test_bad_options_are_one_line(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}.*{value}") as error:
        SamplingOptions(**{name: value})
    assert "\n" not in str(error.value)
