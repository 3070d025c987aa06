from __future__ import annotations

import pytest
import torch

from fullband.decode.sampling import Sampler, draw, row_uniforms


def test_greedy_takes_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, -1.0, 1.0]])
    assert Sampler(0.0, 0, range(2), 5)(logits, torch.arange(2), 0).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_stated_distribution(temperature: float) -> None:
    """Chi-square of 20,000 draws over 8 tokens: 24.3 is the 99.9% point of 7 degrees of freedom."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, -2.0])
    rows, steps = 100, 200
    sampler = Sampler(temperature, 3, range(rows), steps)
    drawn = torch.stack([sampler(logits.expand(rows, -1), torch.arange(rows), step) for step in range(steps)])
    observed = torch.bincount(drawn.flatten(), minlength=8).double()
    expected = rows * steps * torch.softmax(logits.double() / temperature, -1)
    assert ((observed - expected).square() / expected).sum() < 24.3


def test_a_row_draws_alone_what_it_draws_in_company() -> None:
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    together, alone = Sampler(1.0, 5, range(8), 10), Sampler(1.0, 5, [6], 3)
    for step in range(3):
        assert together(logits, torch.arange(8), step)[6] == alone(logits[6:7], torch.tensor([0]), step)[0]
    remaining = torch.tensor([6, 2])  # the others have finished
    assert torch.equal(together(logits[remaining], remaining, 4), together(logits, torch.arange(8), 4)[remaining])


def test_streams_differ_by_seed_and_row_and_not_by_length() -> None:
    numbers = row_uniforms(1, range(3), 10)
    assert len(numbers.flatten().unique()) == 30
    assert torch.equal(row_uniforms(1, range(3), 4), numbers[:, :4])
    assert not torch.equal(row_uniforms(2, range(3), 10), numbers)


def test_the_edges_of_the_distribution() -> None:
    """A token of probability zero is never drawn, even by the smallest and the largest uniform number."""
    scores = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]], dtype=torch.float64).expand(2, -1)
    assert draw(scores, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)).tolist() == [1, 3]
    many = torch.zeros(1, 100_003)  # float32: the last cumulative probability is not 1
    assert 0 <= int(draw(many, torch.tensor([1 - 2**-53], dtype=torch.float64))) < 100_003


def test_a_tiny_temperature_is_greedy() -> None:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(1))
    assert torch.equal(Sampler(1e-6, 0, range(4), 1)(logits, torch.arange(4), 0), logits.argmax(-1))


@pytest.mark.parametrize("temperature", [-0.1, float("nan"), float("inf")])
def test_bad_temperature(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        Sampler(temperature, 0, range(1), 1)


def test_bad_seed() -> None:
    with pytest.raises(ValueError, match="seed"):
        Sampler(1.0, -1, range(1), 1)
