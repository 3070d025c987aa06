"""Repeated passes over linear maps with known numbers."""

from __future__ import annotations

import math

import pytest
import torch

from diagnose.toys import Toy, rows
from fullband.data.batch import Batch
from fullband.diagnose.trace import _unigram, trace_passes


@pytest.mark.parametrize("gain", [0.3, 0.8, -0.6, 1.2])
def test_the_change_of_a_linear_map_is_its_gain_to_the_power(gain: float) -> None:
    trace = trace_passes(Toy(gain), rows(64), 16)
    assert trace.horizon == 16 and len(trace.records) == 16
    for record in trace.records[1:]:
        assert record.change_past is not None
        assert record.change_past.absolute == pytest.approx(abs(gain) ** (record.k - 1), rel=1e-5)
    tops = [math.hypot(10, sum(gain**j for j in range(k))) for k in range(1, 17)]
    ratio = (abs(gain) ** 15 / tops[15] / (abs(gain) / tops[1])) ** (1 / 14)
    if abs(gain) ** 15 > 1e-3:
        assert trace.ratio_median == pytest.approx(ratio, rel=1e-5)
    assert trace.ratio_p99 == pytest.approx(trace.ratio_median, rel=1e-5)


def test_nothing_moves_behind_the_wavefront_and_the_front_apart() -> None:
    trace = trace_passes(Toy(1.0), rows(32), 40)
    for record in trace.records[1:32]:
        assert record.moved == pytest.approx((32 - record.k + 1) / 32)
        assert record.change_front is not None and record.change_front.absolute == pytest.approx(1.0)
    assert trace.records[20].change_past is None, "half the row has passed: nothing is past the wavefront throughout"


def test_the_loop_ends_at_the_fixed_point_and_nowhere_else() -> None:
    assert trace_passes(Toy(1.0), rows(32), 1000).fixed_at == 33
    two_cycle = trace_passes(Toy(-1.0), rows(64), 40)
    assert two_cycle.fixed_at is None and len(two_cycle.records) == 40, "a cycle past the wavefront is caught by it: no reason to stop"


def test_gaps_are_those_to_exact_reading() -> None:
    trace = trace_passes(Toy(0.5), rows(16), 16)
    last = trace.records[-1]
    assert last.gap_state == 0 and last.gap_loss == 0
    missing = 0.5**3 * (1 - 0.5 ** (8 - 2)) / 0.5  # of position 8 after 3 passes: 0.5^3 + … + 0.5^8
    assert trace.records[2].gap_state_past == pytest.approx(missing / math.hypot(10, 2), rel=0.02)
    assert trace.records[2].gap_kl_past == pytest.approx(0, abs=1e-12), "the head does not read z"


def test_cycles_have_their_period() -> None:
    assert trace_passes(Toy(-1.0), rows(64), 24).returns.period == 2
    assert trace_passes(Toy(-1.0), rows(64), 24).returns.distance[1] == pytest.approx(0, abs=1e-9)
    angle = 2 * math.pi / 5
    turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    fifth = trace_passes(Toy(turn=turn), rows(64), 32).returns
    assert fifth.distance[4] == pytest.approx(0, abs=1e-6) and fifth.period == 5
    assert trace_passes(Toy(1.0), rows(64), 24).returns.period is None, "a walk does not come back"


def test_arrival_is_flat_where_the_map_contracts_and_steep_where_it_does_not() -> None:
    contracting = trace_passes(Toy(0.5), rows(64), 32).arrival
    needed = next(k for k in range(1, 32) if 0.5**k * 2 / math.hypot(10, 2) < 1e-2)
    assert contracting.late == 1 and contracting.passes_per_position == pytest.approx(0, abs=1e-9)
    assert contracting.median[-1] == needed
    walking = trace_passes(Toy(1.0), rows(64), 32).arrival
    assert walking.passes_per_position == pytest.approx(1, abs=0.15) and walking.late == 0


def test_packed_rows_and_padding_are_measured_by_depth() -> None:
    whole = rows(48, count=1)
    positions = torch.cat([torch.arange(24), torch.arange(24)])[None]
    documents = torch.cat([torch.zeros(24), torch.full((24,), -1)])[None].long()
    packed = Batch(whole.tokens, whole.targets, positions, documents)
    alone = trace_passes(Toy(0.5), whole.rows(0, 1), 8)
    found = trace_passes(Toy(0.5), packed, 8)
    assert found.length == 24 and found.horizon == 8
    assert found.records[3].change_past is not None and alone.records[3].change_past is not None
    assert found.records[3].change_past.absolute == pytest.approx(alone.records[3].change_past.absolute)


def test_memory_does_not_grow_with_the_passes() -> None:
    """No record holds a tensor, and the states that are kept are those of the last passes."""
    trace = trace_passes(Toy(-1.0), rows(512, count=1), 200)
    for record in trace.records:
        assert not any(isinstance(value, torch.Tensor) for value in vars(record).values())
    assert len(trace.records) == 200 and len(trace.returns.distance) == 8


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 3 passes, not 2"):
        trace_passes(Toy(0.5), rows(16), 2)
    with pytest.raises(ValueError, match="5000 tokens do not fit"):
        trace_passes(Toy(0.5), rows(5000, count=1), 3)


def test_the_slope_of_arrival_does_not_depend_on_how_long_one_waits() -> None:
    """All positions arrive once there are as many passes as positions; that says nothing about the map."""
    few, many = (trace_passes(Toy(1.0), rows(64), passes).arrival for passes in (32, 200))
    assert many.late == 1 and few.late == 0
    assert many.passes_per_position == pytest.approx(few.passes_per_position, abs=1e-9)


def test_the_reference_is_not_too_low_where_targets_are_few() -> None:
    few, many = torch.arange(100), torch.randint(100, (20_000,), generator=torch.Generator().manual_seed(0))
    assert _unigram(few, 50_000) == pytest.approx(math.log(50_000), rel=1e-6), "each is new to the others; their own entropy is log 100"
    assert _unigram(many, 50_000) == pytest.approx(math.log(100), rel=0.01)
    assert _unigram(torch.tensor([3, 3, 3, 3]), 50_000) == pytest.approx(0)
