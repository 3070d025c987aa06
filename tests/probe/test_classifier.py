"""The probe finds what is there, nothing else, and never sees the group it is tested on."""

from __future__ import annotations

import numpy as np
import pytest

from fullband.probe.classifier import FOLDS, fit, folds, shuffled, wilson

GROUPS, EACH, WIDTH = 60, 10, 16
groups_N = np.repeat(np.arange(GROUPS), EACH)
labels_N = np.tile([0, 1], GROUPS * EACH // 2)


def states(signal: float, seed: int = 0) -> np.ndarray:
    """Noise [N, 16] of deviation 1, with the label along one direction."""
    random = np.random.Generator(np.random.Philox(seed))
    direction = random.normal(size=WIDTH)
    return random.normal(size=(len(labels_N), WIDTH)) + signal * np.outer(2 * labels_N - 1, direction / np.linalg.norm(direction))


def test_a_planted_signal_is_found() -> None:
    probed = fit(states(3.0), labels_N, groups_N)
    assert probed.accuracy > 0.99
    assert probed.accuracy == pytest.approx(np.mean(probed.fold_accuracy))


def test_noise_is_at_chance() -> None:
    probed = fit(states(0.0), labels_N, groups_N)
    assert probed.accuracy == pytest.approx(0.5, abs=0.06)
    low, high = probed.interval
    assert low < 0.5 < high and 0 < probed.stderr < 0.05


def test_the_same_state_everywhere_is_at_chance_exactly() -> None:
    assert fit(np.full((len(labels_N), WIDTH), 0.1, dtype=np.float32), labels_N, groups_N).accuracy == 0.5


def test_what_only_a_group_knows_does_not_count() -> None:
    """States that tell the group, and labels that depend on the group alone: memorising groups gets nowhere."""
    own = np.eye(GROUPS)[groups_N]
    label_of_group = np.random.Generator(np.random.Philox(1)).permutation(np.arange(GROUPS) % 2)
    assert fit(own, label_of_group[groups_N], groups_N).accuracy < 0.6


def test_shuffled_labels_are_at_chance_and_balanced_in_every_group() -> None:
    mixed_N = shuffled(labels_N, groups_N)
    assert (mixed_N != labels_N).any()
    assert all(mixed_N[groups_N == group].sum() == EACH // 2 for group in range(GROUPS))
    assert fit(states(3.0), mixed_N, groups_N).accuracy == pytest.approx(0.5, abs=0.06)


def test_no_group_is_in_two_folds() -> None:
    held_out = [set(groups_N[test]) for _, test in folds(groups_N)]
    assert len(held_out) == FOLDS and set.union(*held_out) == set(range(GROUPS)) and sum(map(len, held_out)) == GROUPS
    assert all(not set(groups_N[training]) & set(groups_N[test]) for training, test in folds(groups_N))


def test_fewer_groups_than_folds_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 4 groups, not 3"):
        folds(np.repeat(np.arange(3), 4))


def test_wilson() -> None:
    """Wilson 1927: 81 of 263 gives 0.255 to 0.366 (Newcombe 1998, table I)."""
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
