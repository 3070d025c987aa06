"""Rollouts, perturbations, reachability and the choice of rows."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from diagnose.toys import HalfToy, Toy, rows
from fullband.config import TaskSource
from fullband.data.batch import Document
from fullband.diagnose import diagnose, measure_reach, perturb, roll_out, rows_of_documents, rows_of_task
from fullband.diagnose.diagnosis import DiagnosisSettings
from fullband.diagnose.rollout import distinct_ngrams, ending_loop
from fullband.diagnose.trace import trace_passes


@pytest.mark.parametrize(("gain", "growth"), [(0.5, 0.5), (-0.8, 0.8), (1.1, 1.1)])
def test_a_nudge_grows_by_the_gain(gain: float, growth: float) -> None:
    """The noise's share that lands in z is what lives on. Over passes it moves along the row: other positions, other noise."""
    found = perturb(Toy(gain, start=0.0), rows(64), sigma=0.01, passes=10, positions=12)
    assert found.over_passes is not None
    for response, error in ((found.along_positions, 1e-3), (found.over_passes, 0.06)):
        assert response.distance[0] == pytest.approx(0.01, rel=1e-6)
        above = [d for d in response.distance[1:] if d > 1e-12]
        assert [b / a for a, b in pairwise(above)] == pytest.approx([growth] * (len(above) - 1), rel=error)


def test_a_nudge_whose_square_overflows_is_measured(isometric_model) -> None:  # type: ignore[no-untyped-def]
    model = isometric_model().float()
    found = perturb(model, rows(40), 1e30).along_positions
    assert found.distance[0] == pytest.approx(1e30, rel=1e-3) and math.isfinite(found.growth)
    assert math.isnan(perturb(model, rows(40), 1e40).along_positions.growth)


def test_norms_past_the_range_of_float16_are_measured() -> None:
    """States go to (60,000, 60,000), a distance of 67,000 from where they began: no norm has room in float16, every element has."""
    toy = HalfToy(start=30_000.0, turn=torch.tensor([[0.5, 0.0], [0.5, 0.5]]))
    records = trace_passes(toy, rows(48), 12).records
    assert records[0].gap_state_past == pytest.approx(math.hypot(3, 6) / math.hypot(6, 6), rel=0.01)
    assert all(math.isfinite(record.gap_state) for record in records)
    found = perturb(toy, rows(64), sigma=0.1, passes=10, positions=12)
    assert found.over_passes is not None
    assert found.along_positions.distance[0] == pytest.approx(0.1, rel=0.02)
    assert found.over_passes.distance[0] == pytest.approx(0.1, rel=0.02)


def test_a_nudge_of_a_model_is_alike_in_batches_and_seeds(isometric_model) -> None:  # type: ignore[no-untyped-def]
    model = isometric_model()
    batch = rows(40)
    assert perturb(model, batch, 0.02, seed=3) == perturb(model, batch, 0.02, seed=3)
    assert perturb(model, batch, 0.02, seed=3) != perturb(model, batch, 0.02, seed=4)
    for sigma in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="above 0"):
            perturb(model, batch, sigma)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_rollout_notes_scales_and_says_when_it_restarted(isometric_model, temperature: float) -> None:  # type: ignore[no-untyped-def]
    model = isometric_model()
    found = roll_out(model, rows(8).tokens.tolist(), 150, temperature)
    assert found.rows == 3 and found.prompt == 8 and found.restarts == 3, "64 - 8 tokens, then 32 more each time: at 57, 90, 123"
    assert len(found.places) == len(found.state_rms) == len(found.input_rms) == 128
    assert found.drift_state == pytest.approx(1, abs=0.2)
    within = roll_out(model, rows(8).tokens.tolist(), 40, temperature)
    assert within.restarts == 0


def test_a_rollout_of_a_growing_map_drifts() -> None:
    found = roll_out(Toy(1.05), rows(4).tokens.tolist(), 200)
    assert found.drift_state > 100
    with pytest.raises(ValueError, match="one length"):
        roll_out(Toy(0.5), [[1, 2], [1, 2, 3]], 4)


def test_a_rollout_of_one_token_reads_none(isometric_model) -> None:  # type: ignore[no-untyped-def]
    """The last new token is not read, so there is no scale to note; two are the fewest."""
    assert roll_out(Toy(0.5), rows(4).tokens.tolist(), 2).places == [1]
    for measure in (
        lambda: roll_out(Toy(0.5), rows(4).tokens.tolist(), 1),
        lambda: diagnose(Toy(0.5), rows(64), DiagnosisSettings(rollout=1)),
    ):
        with pytest.raises(ValueError, match="a rollout must have at least 2 tokens \\(the last one is not run\\), got 1"):
            measure()


def test_a_greedy_toy_repeats_itself() -> None:
    found = roll_out(Toy(0.5), rows(4).tokens.tolist(), 100)
    assert [(loop.period, loop.start) for loop in found.loops] == [(1, 0)] * 3
    assert found.distinct == pytest.approx(1 / 97)


def test_loops_are_found_where_they_begin() -> None:
    assert ending_loop([9, 8, 7, *[1, 2, 3] * 20]) == (3, 3)
    assert ending_loop([*[1, 2, 3] * 20, 9]) is None
    assert ending_loop([1, 2] * 10) is None, "20 tokens are not a loop yet"
    assert ending_loop(list(range(100))) is None
    assert distinct_ngrams([1] * 10) == pytest.approx(1 / 7) and distinct_ngrams([1, 2]) == 1


def test_reachability_is_the_papers(isometric_model) -> None:  # type: ignore[no-untyped-def]
    standard, soft = measure_reach(isometric_model(layers=3, full_every=1), torch.arange(6), prompt=3)
    assert (standard.mode, soft.mode) == ("standard", "soft") and standard.layers == [0, 1, 2, 3]
    assert standard.unexpected == soft.unexpected == 0
    for target in range(4):
        for position in range(5):
            for source in range(4):
                assert (standard.influence[target][position][source] > 0) == (source < target)
                seen = source < 3 or position >= 2
                assert (soft.influence[target][position][source] > 0) == seen


@pytest.mark.parametrize(("source", "carried"), [("first", 1), ("middle", 2), ("mix", 4), ("top", 4)])
def test_reachability_of_a_lower_layer_fed_back(isometric_model, source: str, carried: int) -> None:  # type: ignore[no-untyped-def]
    """What is above the carried layer is read only by layers above it, as in Standard."""
    standard, soft = measure_reach(isometric_model(layers=4, full_every=1, source=source), torch.arange(6), prompt=3)
    assert standard.carried == soft.carried == carried and standard.unexpected == soft.unexpected == 0
    for target in range(5):
        for position in range(5):
            reached = [value > 0 for value in soft.influence[target][position]]
            assert reached == [source < target or source < carried + (position >= 2) for source in range(5)]


def test_a_fusion_that_passes_nothing_on_breaks_eq_7(isometric_model) -> None:  # type: ignore[no-untyped-def]
    model = isometric_model(layers=3, full_every=1)
    torch.nn.init.zeros_(model.connection.mergers[0].state.weight)
    standard, soft = measure_reach(model, torch.arange(6), prompt=3)
    assert standard.unexpected == 0 and soft.unexpected > 0


def test_deep_stacks_are_looked_at_in_a_few_layers(isometric_model) -> None:  # type: ignore[no-untyped-def]
    found = measure_reach(isometric_model(layers=20), torch.arange(6))[0]
    assert found.layers[0] == 0 and found.layers[-1] == 20 and len(found.layers) == 9


def test_a_trunk_without_blocks_says_so() -> None:
    found = diagnose(Toy(0.5), rows(64), DiagnosisSettings(rollout=0))
    assert found.reach == [] and "no list of blocks" in str(found.reach_missing)
    assert found.verdict.word == "contracting"


def documents(*lengths: int) -> list[Document]:
    return [Document(torch.full((n,), i), torch.full((n,), i)) for i, n in enumerate(lengths)]


def test_rows_come_from_different_documents_first() -> None:
    batch = rows_of_documents(documents(600, 300, 300), rows=4, passes=8, context=1000)
    assert batch.shape == (4, 256) and batch.tokens[:, 0].tolist() == [0, 1, 2, 0]
    assert rows_of_documents(documents(600, 100, 90, 80), rows=4, passes=400, context=1000).shape == (2, 300), "half of the longest"
    batch = rows_of_documents(documents(600, 300, 300), rows=4, passes=8, context=1000, length=200)
    assert batch.shape == (4, 200) and batch.tokens[:, 0].tolist() == [0, 1, 2, 0]
    assert rows_of_documents(documents(3000), 8, passes=500, context=2048).shape == (3, 1000)
    assert rows_of_documents(documents(3000), 8, passes=500, context=128).shape == (8, 128)


def test_rows_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="the longest has 300"):
        rows_of_documents(documents(300), 4, 8, 1000, length=400)
    with pytest.raises(ValueError, match="context of 100"):
        rows_of_documents(documents(300), 4, 8, 100, length=200)
    with pytest.raises(ValueError, match="nothing to evaluate"):
        rows_of_documents(documents(1), 4, 8, 100)
    with pytest.raises(ValueError, match="context of 100"):
        rows_of_task(TaskSource(), 0, 4, 8, 100, length=200)


def test_task_rows_are_held_out_and_not_longer_than_can_be_followed() -> None:
    assert rows_of_task(TaskSource(), 0, 4, 32, 1000).shape == (4, 256)
    assert rows_of_task(TaskSource(), 0, 4, 32, 1000, trained=16).shape == (4, 64)
    assert rows_of_task(TaskSource(), 0, 4, 32, 50, trained=16).shape == (4, 50)
