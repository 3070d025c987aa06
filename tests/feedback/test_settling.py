"""Settling on a toy whose contraction is known: the state is (a constant, r · carried + e), so a change shrinks by r a pass."""

import math

import pytest
import torch

from fullband.feedback.settling import Changes, measure_settling, settled_from
from fullband.layout import Layout
from reference.seam import read
from reference.toy import ToyModel


class Toy(ToyModel):
    """A linear trunk without attention, and the fusion that carries r times the state's second half."""

    context, vocab_size = 10_000, 9

    def __init__(self, ratio, constant=100.0):
        self.ratio, self.constant = ratio, constant
        self.connect_itself()

    def embed(self, tokens):
        return torch.stack([torch.full_like(tokens, self.constant, dtype=torch.float64), 1.0 + tokens * 0.0], -1)

    def input_norm(self, x):
        return x

    def fusion(self, e, carried, input_norm):
        return e + self.ratio * carried * torch.tensor([0.0, 1.0], dtype=torch.float64)

    def __call__(self, inputs, positions=None, documents=None, cache=None, keep="none"):
        return inputs, None


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.9])
def test_contraction_has_its_ratio(ratio):
    found = measure_settling(Toy(ratio), torch.zeros(2, 40, dtype=torch.long), 12, tolerance=1e-3)
    assert found.measurable and found.settled(0.95)
    assert found.ratio_median == pytest.approx(ratio, rel=1e-3) and found.ratio_p99 == pytest.approx(ratio, rel=1e-3)
    assert found.relative_change[:4] == pytest.approx([ratio**k / 100 for k in range(1, 5)], rel=0.01)
    expected = next((k for k in range(2, 13) if ratio ** (k - 1) / 100 < 1e-3), None)
    assert found.passes_needed == expected


def test_expansion_is_not_settled():
    found = measure_settling(Toy(1.3, constant=1e4), torch.zeros(1, 40, dtype=torch.long), 12, tolerance=1e-4)
    assert found.ratio_median == pytest.approx(1.3, rel=0.02) and found.passes_needed is None and not found.settled(0.95)


def test_one_diverging_position_in_ten_is_not_settled():
    """The median alone would pass it; the 99th percentile does not."""

    class Mixed(Toy):
        def fusion(self, e, carried, input_norm):
            rows = torch.arange(len(e))[:, None, None]
            return e + torch.where(rows == 0, 1.2, 0.4) * carried * torch.tensor([0.0, 1.0], dtype=torch.float64)

    found = measure_settling(Mixed(0.0), torch.zeros(10, 40, dtype=torch.long), 10, tolerance=1e-3)
    assert found.ratio_median == pytest.approx(0.4, rel=0.01) and found.ratio_p99 > 1.1 and not found.settled(0.9)


@pytest.mark.parametrize("ratio", [0.0, 1e-9])
def test_a_state_that_nothing_moves_is_settled(ratio):
    found = measure_settling(Toy(ratio), torch.zeros(1, 40, dtype=torch.long), 8)
    assert found.passes_needed == 2 and found.settled(0.9)


def test_the_wavefront_is_left_out():
    """Before position k everything is final after k passes, whatever the map: with T < 2k there is nothing to measure."""
    for length, measurable in ((23, False), (24, True)):
        found = measure_settling(Toy(1.3), torch.zeros(1, length, dtype=torch.long), 12)
        assert found.measurable is measurable
    assert not measure_settling(Toy(1.3), torch.zeros(1, 23, dtype=torch.long), 12).settled(0.9)
    tokens = torch.zeros(1, 48, dtype=torch.long)
    halves = torch.arange(48)[None] // 23
    assert not measure_settling(Toy(1.3), tokens, 12, layout=Layout(torch.arange(48)[None] % 23, halves)).measurable
    padded = torch.where(torch.arange(48)[None] < 23, 0, -1)
    assert not measure_settling(Toy(1.3), tokens, 12, layout=Layout(torch.arange(48)[None], padded)).measurable


def test_padding_is_not_measured(isometric_model, packed_rows):
    model = isometric_model()
    rows = packed_rows([[24, -16], [-16, 24]])
    alone = measure_settling(model, torch.stack([rows.tokens[0, :24], rows.tokens[1, 16:]]), 8)
    padded = measure_settling(model, rows.tokens, 8, 1e-2, Layout(rows.positions, rows.documents))
    assert padded.ratio_median == pytest.approx(alone.ratio_median, abs=1e-5)
    assert padded.relative_change == pytest.approx(alone.relative_change, abs=1e-5)


def test_too_few_passes_are_refused():
    with pytest.raises(ValueError, match="at least 3 passes, not 2"):
        measure_settling(Toy(0.5), torch.zeros(1, 40, dtype=torch.long), 2)


def test_the_toy_is_what_it_says():
    states = read(Toy(0.5), torch.zeros(1, 6, dtype=torch.long), 5)
    assert states[0, :, 1].tolist() == [sum(0.5**j for j in range(t + 1)) for t in range(6)]


@pytest.mark.parametrize(
    ("p99", "needed"),
    [
        ([0.5, 1e-3, 0.5, 0.5], None),  # a rest of one pass, then a move
        ([0.5, 0.5, 0.5, 1e-3], None),  # whether this one would have stayed is not known
        ([1e-3, 0.5, 1e-3, 1e-3], 4),
        ([1e-3, 1e-3, 1e-3], 2),
        ([1e-3, 1e-3, math.nan], None),
    ],
)
def test_a_rest_counts_where_it_stays(p99, needed):
    assert settled_from(p99, 1e-2) == needed


def test_a_state_that_rests_for_a_pass_and_moves_on_is_not_settled():
    """Nothing moves in every third pass, the last one included, and everything in the others."""

    class Ticking(Toy):
        calls = 0

        def __call__(self, inputs, positions=None, documents=None, cache=None, keep="none"):
            self.calls += 1
            inputs[..., 1] = (-1.0) ** (self.calls - self.calls // 3)
            return inputs, None

    found = measure_settling(Ticking(0.0, constant=1.0), torch.zeros(1, 40, dtype=torch.long), 12, tolerance=1e-3)
    assert min(found.relative_change) == 0, "there are passes that move nothing"
    assert found.passes_needed is None and not found.settled(0.9)


def test_a_cycle_that_is_reached_slowly_shrinks_at_first_and_not_at_the_end():
    changes = Changes(1, 16, 1e-5, torch.device("cpu"))
    for k in range(16):
        changes.add(torch.tensor([0.5 + 0.5**k]))
    assert changes.ratios().item() < 0.97
    assert changes.late_ratios().item() == pytest.approx(1, abs=1e-2)


class Disturbed(Toy):
    """Settles at once; then `pulse(k, position)` is added to the states of pass k, and to no other's."""

    def __init__(self, pulse):
        super().__init__(0.0)
        self.pulse, self.k = pulse, 0

    def __call__(self, inputs, positions=None, documents=None, cache=None, keep="none"):
        self.k += 1
        place_T = torch.arange(inputs.shape[1])
        return inputs + 50.0 * self.pulse(self.k, place_T)[:, None].double(), None


def test_what_settles_early_and_is_disturbed_later_has_not_settled_before():
    tokens = torch.zeros(2, 64, dtype=torch.long)
    calm = measure_settling(Disturbed(lambda k, t: t < 0), tokens, 24)
    assert calm.passes_needed == 2 and calm.settled(0.9)
    found = measure_settling(Disturbed(lambda k, t: (t >= 0) & (k == 14)), tokens, 24)
    assert found.relative_change[1:11] == [0.0] * 10 and found.passes_needed == 16, "the pulse comes in pass 14 and goes in pass 15"
    assert found.front is not None and not found.front.travels and found.front.at_half > 14
    late = measure_settling(Disturbed(lambda k, t: (t >= 0) & (k == 24)), tokens, 24)
    assert late.passes_needed is None and not late.settled(0.9)


def test_a_front_is_not_settled_though_every_state_came_to_rest():
    """Each position moves once, later positions later, and long before the passes end."""
    tokens = torch.zeros(2, 80, dtype=torch.long)
    found = measure_settling(Disturbed(lambda k, t: t // 4 == k), tokens, 36)
    assert found.passes_needed is not None and found.passes_needed < 30, "by the passes alone it would have settled"
    assert found.front is not None and found.front.travels and found.front.slope == pytest.approx(0.25, rel=0.1)
    assert not found.settled(0.9) and not found.settled(2.0)
