"""The keyed hash behind jitter: uniform, and without memory between neighbours of any kind."""

import math

import numpy as np
import pytest
import torch

from fullband.feedback.multipass import Jitter
from fullband.feedback.noise import keyed_generator, keyed_uniform

ROWS, POSITIONS, WIDTH = 16, 64, 64
N = ROWS * POSITIONS * WIDTH


def noise(key=(0, 0, 2), rows=ROWS, positions=POSITIONS, width=WIDTH, first_row=0):
    return keyed_uniform(key, torch.arange(first_row, first_row + rows), torch.arange(positions), width, torch.float64)


def pairs():
    """Neighbours in every sense: (name, a, b), each [N]."""
    big = noise(rows=ROWS + 1, positions=POSITIONS + 1, width=WIDTH + 1)
    here = big[:-1, :-1, :-1]
    yield "row", here, big[1:, :-1, :-1]
    yield "position", here, big[:-1, 1:, :-1]
    yield "channel", here, big[:-1, :-1, 1:]
    yield "row against position", big[1:, :-1, :-1], big[:-1, 1:, :-1]
    yield "position against channel", big[:-1, 1:, :-1], big[:-1, :-1, 1:]
    for name, other in (("seed", (1, 0, 2)), ("step", (0, 1, 2)), ("pass", (0, 0, 3)), ("seed for step", (1, 0, 2)), ("order", (2, 0, 0))):
        yield name, noise(), noise(other)
    yield "seed against step", noise((1, 0, 2)), noise((0, 1, 2))


def chi_square(cells, bins):
    counts = np.bincount(cells, minlength=bins)
    expected = len(cells) / bins
    return ((counts - expected) ** 2 / expected).sum(), bins - 1


def within(statistic, freedom, sigmas=5):
    return abs(statistic - freedom) < sigmas * math.sqrt(2 * freedom)


def test_moments_range_and_uniformity():
    for key in ((0, 0, 2), (0, 1, 2), (7, 12345, 3), (2**31, 10**6, 4)):
        x = noise(key).flatten()
        assert x.min() >= -1 and x.max() <= 1
        assert abs(x.mean()) < 5 / math.sqrt(3 * N)
        assert abs(x.var() - 1 / 3) < 5 * math.sqrt(4 / 45 / N)
        assert abs((x**3).mean()) < 5 / math.sqrt(7 * N)
        assert within(*chi_square(((x.numpy() + 1) * 127.999).astype(int), 256))


@pytest.mark.parametrize("name, a, b", list(pairs()), ids=[name for name, _, _ in pairs()])
def test_neighbours_are_independent(name, a, b):
    a, b = a.flatten().numpy(), b.flatten().numpy()
    for f in (lambda x: x, lambda x: x**2 - 1 / 3, np.abs):
        correlation = np.corrcoef(f(a), f(b))[0, 1]
        assert abs(correlation) < 5 / math.sqrt(N), f"{name}: {correlation}"
    cells = ((a + 1) * 7.9999).astype(int) * 16 + ((b + 1) * 7.9999).astype(int)
    assert within(*chi_square(cells, 256)), name
    assert abs((a == b).mean() - 0) < 1e-4


def test_every_row_and_position_has_noise_of_its_own():
    x = noise((0, 3, 2), rows=256, positions=256, width=4)
    assert len(torch.unique(x.view(-1, 4), dim=0)) >= 256 * 256 - 2
    assert abs(x.mean(-1).flatten().var() - 1 / 12) < 0.003  # channels of one position do not lean one way together
    assert abs(x.mean((0, 2)).var() * 256 * 4 * 3 - 1) < 0.5 and abs(x.mean((1, 2)).var() * 256 * 4 * 3 - 1) < 0.5


def test_any_part_can_be_computed_alone():
    whole = noise()
    part = keyed_uniform((0, 0, 2), torch.tensor([9, 3]), torch.arange(10, 20), WIDTH, torch.float64)
    assert torch.equal(part, whole[[9, 3], 10:20])
    assert torch.equal(noise(width=10), whole[..., :10])
    assert torch.equal(keyed_uniform((0, 0, 2), torch.arange(ROWS), torch.arange(POSITIONS), WIDTH, torch.float32), whole.float())


def test_jitter_is_bounded_by_sigma_and_off_at_zero():
    like = torch.zeros(4, 9, 8, dtype=torch.float64)
    jitter = Jitter(0.02, 0, 0, torch.arange(4))
    assert 0.019 < jitter(2, 0, 9, like).abs().max() <= 0.02
    assert torch.equal(jitter(2, 3, 9, like), jitter(2, 0, 9, like)[:, 3:])
    assert Jitter(0.0, 0, 0, torch.arange(4))(2, 0, 9, like) is None


def test_jitter_is_keyed_by_seed_step_row_and_pass():
    like, rows = torch.zeros(2, 9, 8, dtype=torch.float64), torch.arange(2)
    values = [Jitter(1.0, seed, step, rows)(k, 0, 9, like) for seed, step, k in ((0, 0, 2), (0, 0, 3), (0, 1, 2), (1, 0, 2))]
    values.append(Jitter(1.0, 0, 0, rows + 2)(2, 0, 9, like))
    for i, a in enumerate(values):
        assert all((a - b).abs().min(-1).values.max() > 1e-3 and not (a == b).any() for b in values[:i])


def test_purposes_do_not_share_a_stream():
    draws = {keyed_generator(purpose, 0, 5, 2).integers(2**60) for purpose in ("passes", "prefix", "jitter")}
    assert len(draws) == 3
    assert keyed_generator("prefix", 0, 5).integers(2**60) == keyed_generator("prefix", 0, 5).integers(2**60)
