"""Each verdict from a map that deserves it, and the numbers it names."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from diagnose.toys import Toy, rows
from fullband.diagnose.trace import trace_passes
from fullband.diagnose.verdict import judge, reference_loss


@pytest.mark.parametrize("gain", [0.3, -0.5, 0.8])
def test_contracting(gain: float) -> None:
    trace = trace_passes(Toy(gain), rows(128), 32)
    found = judge(trace)
    assert found.word == "contracting"
    assert f"ratio {trace.ratio_median:.3f} a pass in the median" in found.why[0]
    assert f"from pass {trace.passes_needed[1e-2]} on" in found.why[1]


def test_a_two_cycle_is_oscillating() -> None:
    found = judge(trace_passes(Toy(-1.0, start=4.0), rows(64), 24))
    assert found.word == "oscillating" and "return after 2 passes" in found.why[0]
    assert "shrinks to the end at 0.0% of the positions" in found.why[1], "what would make it contracting, too"


class Saturates(Toy):
    """z_t = -2 tanh(z_{t-1}): one large step first, then a cycle of two."""

    def fusion(self, embedding, carried, input_norm):  # type: ignore[no-untyped-def]
        return torch.cat([embedding[..., :4], -2 * torch.tanh(carried[..., 4:])], dim=-1)


def test_a_change_that_shrinks_at_first_and_then_no_longer_is_not_contracting() -> None:
    trace = trace_passes(Saturates(start=8.0), rows(64), 32)
    assert trace.ratio_p99 < 0.98, "from the first change to the last it shrank everywhere"
    assert trace.late_ratio == pytest.approx(1, abs=1e-6) and trace.shrinking == 0
    assert judge(trace).word == "oscillating"


class Uneven(Toy):
    """A map that shrinks by half at two tokens and grows at the two others: it contracts over many positions, not at each."""

    def __init__(self, grows: float):
        super().__init__(start=4.0)
        self.grows = grows

    def fusion(self, embedding, carried, input_norm):  # type: ignore[no-untyped-def]
        gain = torch.where(embedding[..., :4].argmax(-1, keepdim=True) < 2, 0.5, self.grows).double()
        return torch.cat([embedding[..., :4], embedding[..., 4:] + gain * carried[..., 4:]], dim=-1)


def test_an_uneven_contraction_is_no_oscillation() -> None:
    """In each pass the change grows at some positions; its median and its 99th percentile over positions fall all the same."""
    trace = trace_passes(Uneven(1.1), rows(128, count=8), 16, tolerance=1e-5)
    assert trace.passes_needed[1e-5] is None and trace.shrinking < 0.95 and trace.ratio_p99 < 0.97
    found = judge(trace)
    assert found.word == "contracting" and f"at {trace.shrinking:.1%} of the positions. (Contracting: at 95%" in found.why[1]


def test_too_few_passes_for_the_largest_changes() -> None:
    batch = rows(192, count=8)
    few = judge(trace_passes(Uneven(1.4), batch, 8, tolerance=1e-5))
    assert few.word == "not measurable at this length" and "8 passes do not say whether" in few.why[0]
    assert judge(trace_passes(Uneven(1.4), batch, 80, tolerance=1e-5)).word == "contracting"


def test_a_few_positions_that_do_not_settle_are_no_contraction() -> None:
    """The median has come below the tolerance, so nothing is left to wait for: it is the rest that decides."""
    trace = trace_passes(Toy(-1.0, start=4.0), rows(64), 24)
    settling = [
        dataclasses.replace(r, change_past=r.change_past and dataclasses.replace(r.change_past, median=0.3**r.k)) for r in trace.records
    ]
    no_return = dataclasses.replace(trace.returns, distance=[1.0, 1.4, 1.7])
    assert judge(dataclasses.replace(trace, records=settling, returns=no_return, shrinking=0.9)).word == "oscillating"


def test_an_expansion_is_diverging() -> None:
    found = judge(trace_passes(Toy(1.5), rows(64), 24))
    assert found.word == "diverging" and "from pass 2 to 24" in found.why[0]


def test_what_overflows_is_diverging() -> None:
    found = judge(trace_passes(Toy(1e30), rows(64), 24))
    assert found.word == "diverging" and "no longer finite" in found.why[0]


class Wave(Toy):
    """Results that wait for one another: z_t is that of `reach` positions before plus its own part, until a given position ends the chain.

    A pass carries z one position on by the fusion; the trunk carries it `reach` - 1 more, so that the front runs at `reach` a pass.
    """

    def __init__(self, reach: int):
        super().__init__(start=1.0)
        self.reach = reach

    def __call__(self, inputs, positions=None, documents=None, cache=None, keep="none"):  # type: ignore[no-untyped-def]
        """Every `reach`-th position knows the state carried to it; those behind it, up to the next, read it there (attention)."""
        length = inputs.shape[1]
        before = 0 if cache is None else cache.states.shape[1]
        seen = inputs if cache is None else torch.cat([cache.states, inputs], 1)
        place = torch.arange(before, before + length) // self.reach * self.reach
        states = torch.cat([inputs[..., :4], seen[:, place, 4:]], dim=-1)
        return states, None if keep == "none" else Read(seen)

    def fusion(self, embedding, carried, input_norm):  # type: ignore[no-untyped-def]
        grown = carried[..., 4:] + embedding[..., 4:]  # counts blocks: bounded, and no two neighbours alike
        return torch.cat([embedding[..., :4], 4 * torch.sin(grown)], dim=-1)


@dataclasses.dataclass(frozen=True)
class Read:
    """The cache of `Wave`: all it has been given."""

    states: torch.Tensor

    @property
    def length(self) -> int:
        return self.states.shape[1]

    def fork(self) -> Read:
        return self

    def select(self, rows: torch.Tensor) -> Read:
        return Read(self.states[rows])


@pytest.mark.parametrize("reach", [4, 8])
@pytest.mark.parametrize("passes", [32, 1000])
def test_a_front_is_no_contraction_however_fast_it_runs(reach: int, passes: int) -> None:
    """It has crossed the rows long before the passes end, after which nothing changes."""
    trace = trace_passes(Wave(reach), rows(96), passes)
    front = trace.arrival.front
    assert front is not None and front.slope == pytest.approx(1 / reach, rel=0.1)
    assert trace.shrinking >= 0.95, "by its changes it has settled"
    found = judge(trace)
    assert found.word == "wavefront-limited" and any("a front, not contraction" in sentence for sentence in found.why), found


class Sum(Toy):
    """The answer is the running sum modulo 4 of the tokens: nothing but the state before can tell it, one position a pass."""

    def fusion(self, embedding, carried, input_norm):  # type: ignore[no-untyped-def]
        shift = embedding[..., :4].argmax(-1)
        value = (shift + carried[..., :4].argmax(-1)) % 4
        return torch.cat([self.constant * torch.nn.functional.one_hot(value, 4).double(), embedding[..., 4:]], dim=-1)


def test_a_running_sum_is_wavefront_limited() -> None:
    batch = rows(64)
    trace = trace_passes(Sum(), dataclasses.replace(batch, targets=batch.tokens.cumsum(1) % 4), 24)
    found = judge(trace)
    assert found.word == "wavefront-limited" and trace.loss_exact < 0.01
    assert trace.arrival.passes_per_position == pytest.approx(0.75, abs=0.3)
    assert "Waiting is worth it" in found.why[1]


def test_rows_that_show_too_few_passes() -> None:
    found = judge(trace_passes(Toy(0.5), rows(15), 32))
    assert found.word == "not measurable at this length" and "sequences of 16" in found.why[0]
    assert judge(trace_passes(Toy(0.5), rows(16), 32)).word == "contracting"
    assert "Only 7 passes" in judge(trace_passes(Toy(0.5), rows(64), 7)).why[0]


def test_untrained_in_each_of_its_ways() -> None:
    knows_nothing = judge(trace_passes(Toy(0.5, constant=1e-3), rows(64), 12))
    assert knows_nothing.word == "not yet trained" and "No evaluation" in knows_nothing.why[0]
    passes_nothing = judge(trace_passes(Toy(0.0), rows(64), 12))
    assert passes_nothing.word == "not yet trained" and "fusion has no effect" in passes_nothing.why[0]

    class Scrambles(Toy):
        def fusion(self, embedding, carried, input_norm):  # type: ignore[no-untyped-def]
            return embedding.roll(1, dims=-1) + carried

    scrambled = judge(trace_passes(Scrambles(), rows(64), 12))
    assert scrambled.word == "not yet trained" and "but its fusion has not" in scrambled.why[0]


def test_random_weights_are_not_yet_trained(trunk_config) -> None:  # type: ignore[no-untyped-def]
    from fullband.model import FullBandModel

    for fusion in ("gated", "residual", "add", "concat"):
        torch.manual_seed(0)
        model = FullBandModel(trunk_config(), fusion).eval()
        tokens = torch.randint(23, (4, 64))
        batch = dataclasses.replace(rows(64, count=4), tokens=tokens, targets=tokens.roll(-1, 1))
        assert judge(trace_passes(model, batch, 16)).word == "not yet trained", fusion


def test_a_bounded_change_that_never_settles_oscillates_and_a_climbing_loss_diverges() -> None:
    trace = trace_passes(Toy(-1.0, start=4.0), rows(64), 24)
    no_return = dataclasses.replace(trace, returns=dataclasses.replace(trace.returns, distance=[1.0, 1.4, 1.7]))
    assert judge(no_return).word == "oscillating"
    climbing = [dataclasses.replace(r, loss_past=0.05 + 0.1 * r.k) for r in trace.records]
    assert judge(dataclasses.replace(no_return, records=climbing, loss_exact_past=3.0)).word == "diverging"


def test_a_bad_fixed_point_is_said_to_be_bad() -> None:
    trace = trace_passes(Toy(0.3), rows(128), 16)
    worse = [dataclasses.replace(r, loss_past=r.loss_past + 0.1 * min(r.k, 8)) for r in trace.records if r.loss_past is not None]
    found = judge(dataclasses.replace(trace, records=worse))
    assert found.word == "contracting" and "a higher loss" in found.why[2]
    assert found.worse is not None and "16 passes have a higher loss than one" in found.headline
    assert judge(trace).headline == "contracting"
    assert reference_loss(trace) == pytest.approx(1.386, abs=0.01)
