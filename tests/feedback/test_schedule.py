"""Law 7: passes and prefixes are pure functions of their keys; shares and distributions are what the recipe says."""

import math
import time

import numpy as np
import pytest
import torch

from fullband.feedback.schedule import AdaptiveShare, PassSchedule
from fullband.feedback.settling import Settling
from fullband.feedback_config import SCHEDULES, AdaptiveConfig, FeedbackConfig, Phase
from fullband.presets import PAPER_RUNS
from fullband.spans import schedule_spans

PHASES = [Phase(fraction=0.75, passes={1: 1.0}), Phase(fraction=0.25, passes={2: 0.88, 3: 0.12})]


def schedule(phases=PHASES, steps=400, seed=0, **config):
    return PassSchedule(FeedbackConfig(schedule=phases, **config), steps, seed)


def settling(ratio, needed=None, measurable=True):
    return Settling([], ratio, ratio, needed, 1e-2, measurable)


def draws(s):
    rows = torch.arange(4)
    prefixes = [s.prefixes(step, a, 3, 50, rows) for step in range(0, 400, 7) for a in (0, 1)]
    return [s.passes(step) for step in range(400)], [[p.tolist() if isinstance(p, torch.Tensor) else p for p in ps] for ps in prefixes]


@pytest.mark.parametrize("prefix", ["uniform", "shared", "per-row", "off"])
def test_draws_are_pure_functions_of_their_keys(prefix):
    first = draws(schedule(prefix=prefix))
    torch.manual_seed(99), np.random.seed(99)
    again = schedule(prefix=prefix)
    again.passes(399), again.prefixes(12, 0, 4, 9, torch.arange(2))
    assert draws(again) == first, "asking in another order changes the answer"
    assert (draws(schedule(prefix=prefix, seed=1))[1] == first[1]) == (prefix == "off")


def test_a_shared_prefix_is_one_for_all_passes():
    shared, own = schedule(prefix="shared"), schedule(prefix="uniform")
    rows = torch.arange(2)
    drawn = [shared.prefixes(step, 0, 4, 10**9, rows) for step in range(20)]
    assert all(p == prefixes[0] for prefixes in drawn for p in prefixes) and len({prefixes[0] for prefixes in drawn}) == 20
    assert [prefixes[0] for prefixes in drawn] == [own.prefixes(step, 0, 2, 10**9, rows)[0] for step in range(20)]


def test_the_seed_moves_which_steps_are_deep():
    assert len({tuple(schedule(seed=seed).passes(s) for s in range(300, 400)) for seed in range(5)}) == 5


def test_per_row_prefixes_do_not_depend_on_the_split():
    s = schedule(prefix="per-row")
    whole = s.prefixes(3, 0, 3, 40, torch.arange(8))
    for rows in (torch.tensor([5, 2]), torch.tensor([7])):
        for all_rows, some in zip(whole, s.prefixes(3, 1, 3, 40, rows), strict=True):
            assert torch.equal(all_rows[rows], some)


def test_uniform_prefixes_are_keyed_by_step_accumulation_and_pass():
    s = schedule()
    keys = [(step, a, k) for step in range(8) for a in range(3) for k in (2, 3)]
    drawn = [s.prefixes(step, a, 3, 10**9, torch.arange(2))[k - 2] for step, a, k in keys]
    assert len(set(drawn)) == len(keys)
    assert s.prefixes(5, 1, 2, 10**9, torch.arange(2)) == s.prefixes(5, 1, 4, 10**9, torch.arange(9))[:1]


@pytest.mark.parametrize("kind", ["uniform", "per-row"])
def test_prefix_is_uniform_over_0_to_T_minus_2(kind):
    length, count = 17, 3000
    s = schedule(prefix=kind)
    if kind == "uniform":
        pairs = np.array([s.prefixes(step, 0, 3, length, torch.arange(1)) for step in range(count)])
    else:
        pairs = np.stack([p.numpy() for p in s.prefixes(0, 0, 3, length, torch.arange(count))], 1)
    for column in pairs.T:
        counts = np.bincount(column, minlength=length - 1)
        assert len(counts) == length - 1
        assert ((counts - count / 16) ** 2 / (count / 16)).sum() < 44.3  # 15 degrees of freedom: one in ten thousand
    assert abs(np.corrcoef(pairs.T)[0, 1]) < 5 / math.sqrt(count)


def test_the_shortest_row_and_no_mixin():
    assert schedule().prefixes(0, 0, 3, 2, torch.arange(2)) == [0, 0]
    assert schedule(prefix="off").prefixes(0, 0, 4, 30, torch.arange(2)) == [0, 0, 0]
    assert schedule().prefixes(0, 0, 1, 30, torch.arange(2)) == []


@pytest.mark.parametrize("length", [65, 8192])
def test_prefixes_are_drawn_freely_where_blocks_are_compiled(length):
    """§3.3 wants switches at arbitrary points: few shapes to compile must not mean few prefixes, nor more fused positions."""
    free = FeedbackConfig(schedule="paper-10b")
    compiled = free.compiled(length)
    assert compiled.rounding > 1
    drawn = [
        [PassSchedule(config, 100, 0).prefixes(step, 0, 2, length, torch.arange(1))[0] for step in range(400)]
        for config in (free, compiled)
    ]
    assert drawn[0] == drawn[1] and len(set(drawn[1])) > 60
    assert np.mean(drawn[1]) / length == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("passes", [{1: 0.75, 2: 0.22, 3: 0.03}, {2: 0.88, 3: 0.12}, {1: 0.5, 4: 0.5}, {3: 1.0}])
def test_any_stretch_of_steps_holds_its_shares(passes):
    s = schedule([Phase(fraction=1.0, passes=passes)], steps=3000)
    drawn = np.array([s.passes(step) for step in range(3000)])
    assert set(drawn) == set(passes)
    for start, stop in ((0, 3000), (700, 1100), (50, 150)):
        for k, share in passes.items():
            assert abs((drawn[start:stop] == k).sum() - share * (stop - start)) <= 3


def test_phases_change_at_their_fractions():
    s = schedule()
    assert {s.passes(step) for step in range(300)} == {1}
    assert {s.passes(step) for step in range(300, 400)} == {2, 3}
    assert s.switch_on == 300
    assert [s.warming_fusion(step) for step in (299, 300)] == [False, False]
    warm = schedule(fusion_warmup=5)
    assert [step for step in range(400) if warm.warming_fusion(step)] == [300, 301, 302, 303, 304]
    late = schedule(start_step=350)
    assert late.switch_on == 350 and {late.passes(step) for step in range(350)} == {1}
    assert schedule(SCHEDULES["none"]).switch_on is None


@pytest.mark.parametrize("name, compute", [("paper-10b", 30e9), ("paper-100b", 150e9), ("paper-200b", 256e9), ("paper-400b", 512e9)])
def test_token_equivalent_compute_of_the_paper(name, compute):
    s = schedule(SCHEDULES[name], steps=1000)
    assert s.token_equivalent_compute(int(PAPER_RUNS[name] / 1000)) == pytest.approx(compute, rel=2e-3)
    shares = sum(phase.fraction * k * p for phase in SCHEDULES[name] for k, p in phase.passes.items())
    assert shares * PAPER_RUNS[name] == pytest.approx(compute)


def test_adaptive_share_rises_falls_and_stays_within_bounds():
    share = AdaptiveShare(AdaptiveConfig(floor=0.03, ceiling=0.5, growth=2.0, ratio=0.9))
    share.update(settling(1.2, measurable=False))
    assert share.share is None
    for expected in (0.06, 0.12, 0.24, 0.48, 0.5, 0.5):
        share.update(settling(1.2))
        assert share.share == pytest.approx(expected)
    share.update(settling(0.5))
    assert share.share == pytest.approx(0.5 / math.sqrt(2))
    share.update(settling(1.2, needed=4))
    assert share.share == pytest.approx(0.25), "states that reach the tolerance have settled, whatever the ratio"
    for _ in range(20):
        share.update(settling(0.5))
    assert share.share == pytest.approx(0.03)
    recipe = AdaptiveShare(AdaptiveConfig(floor=0.03, ceiling=0.5, growth=2.0))
    recipe.update(settling(1.2), {1: 0.5, 2: 0.44, 3: 0.04, 5: 0.02})
    assert recipe.share == pytest.approx(0.24), "the first measure starts from the recipe's own share"
    assert [step for step in range(250) if share.due(step)] == [0, 100, 200]


def test_the_adaptive_floor_is_a_share_of_all_batches():
    """The paper's 3% is: where a quarter of the batches feeds back, 12% of those."""
    s = schedule([Phase(fraction=0.75, passes={1: 1.0}), Phase(fraction=0.25, passes={2: 1.0})], adaptive=AdaptiveConfig())
    s.adaptive.update(settling(1.2), s.probabilities(300))
    assert s.adaptive.share == pytest.approx(0.24)  # the first measure starts from the floor
    for _ in range(20):
        s.adaptive.update(settling(0.5))
    assert s.adaptive.share == pytest.approx(0.12)
    drawn = [s.passes(step) for step in range(400)]
    assert drawn.count(3) == pytest.approx(0.03 * 400, abs=1)
    mixed = schedule([Phase(fraction=1.0, passes={1: 0.5, 2: 0.5})], start_step=200, adaptive=AdaptiveConfig())
    assert mixed.adaptive.floor == pytest.approx(0.12)
    assert schedule([Phase(fraction=1.0, passes={1: 0.99, 2: 0.01})], adaptive=AdaptiveConfig()).adaptive.floor == 0.5  # the ceiling
    assert schedule(SCHEDULES["none"], adaptive=AdaptiveConfig()).adaptive.floor == 0.03


def test_reshape_keeps_the_mass_and_the_plain_share():
    share = AdaptiveShare(AdaptiveConfig())
    assert share.reshape({1: 0.5, 2: 0.5}) == {1: 0.5, 2: 0.5}
    share.share = 0.2
    for passes, expected in (
        ({1: 0.5, 2: 0.5}, {1: 0.5, 2: 0.4, 3: 0.1}),
        ({2: 0.88, 3: 0.12}, {2: 0.8, 3: 0.2}),
        ({1: 0.2, 2: 0.4, 3: 0.1, 5: 0.3}, {1: 0.2, 2: 0.64, 3: 0.04, 5: 0.12}),
        ({1: 1.0}, {1: 1.0}),
        ({1: 0.5, 2: 0.0, 3: 0.5}, {1: 0.5, 3: 0.4, 4: 0.1}),
    ):
        assert share.reshape(passes) == pytest.approx(expected)


def test_state_survives_a_checkpoint():
    before = schedule(adaptive=AdaptiveConfig())
    for _ in range(3):
        before.adaptive.update(settling(1.5))
    after = schedule(adaptive=AdaptiveConfig())
    assert draws(after) != draws(before)
    after.load_state_dict(before.state_dict())
    assert draws(after) == draws(before) and after.state_dict() == before.state_dict()
    assert schedule().state_dict() == {"switch_on": 300} and schedule(SCHEDULES["none"]).state_dict() == {"switch_on": None}
    schedule().load_state_dict(before.state_dict())
    fresh = schedule(adaptive=AdaptiveConfig())
    fresh.load_state_dict(schedule(adaptive=AdaptiveConfig()).state_dict())
    assert fresh.adaptive.share is None


def test_a_switch_on_that_a_resumed_run_has_passed_comes_now():
    """A plain run is resumed at step 10 with feedback from step 0 on: warm-up and ramp begin at 10, and stay there at the next resume."""
    plain, feeding = schedule(SCHEDULES["none"]), SCHEDULES["three-pass"]
    changed = schedule(feeding, fusion_warmup=5, loss_weight_ramp=4)
    assert changed.switch_on == 0 and changed.warming_fusion(4) and not changed.warming_fusion(10)
    changed.load_state_dict(plain.state_dict(), step=10)
    again = schedule(feeding, fusion_warmup=5, loss_weight_ramp=4)
    again.load_state_dict(changed.state_dict(), step=12)
    for resumed in (changed, again):
        assert resumed.switch_on == 10
        assert [resumed.warming_fusion(step) for step in (9, 10, 14, 15)] == [False, True, True, False]
    later = schedule(fusion_warmup=5)
    later.load_state_dict(plain.state_dict(), step=10)
    assert later.switch_on == 300 and later.switched_on is None
    earlier = schedule(feeding, fusion_warmup=5)
    earlier.load_state_dict(schedule(feeding).state_dict(), step=3)
    assert earlier.switch_on == 0 and earlier.warming_fusion(4), "feedback that was on goes on"


def test_the_loss_weight_rises_from_the_switch_on():
    ramped = schedule(loss_weight=0.8, loss_weight_ramp=4)
    assert [ramped.loss_weight(step) for step in (0, 299, 300, 301, 303, 304, 399)] == pytest.approx([0, 0, 0.2, 0.4, 0.8, 0.8, 0.8])
    assert {schedule(loss_weight=0.8).loss_weight(step) for step in (0, 299, 300)} == {0.8}


def test_the_prefix_of_chat_data_is_where_its_prompts_are():
    plain_BT = torch.rand(2, 6) < 0.5
    assert all(prefix is plain_BT for prefix in schedule(prefix="answer").prefixes(3, 0, 3, 6, torch.arange(2), plain_BT))
    with pytest.raises(ValueError, match="'answer' needs data that say where answers begin"):
        schedule(prefix="answer").prefixes(3, 0, 3, 6, torch.arange(2))


def test_every_step_of_the_fusion_warmup_feeds_back():
    mixed = [Phase(fraction=0.5, passes={1: 1.0}), Phase(fraction=0.5, passes={1: 0.6, 2: 0.3, 3: 0.1})]
    warming, plain = schedule(mixed, fusion_warmup=50), schedule(mixed)
    assert min(warming.passes(step) for step in range(200, 250)) == 2
    assert 1 in [plain.passes(step) for step in range(200, 250)]
    assert [warming.passes(step) for step in range(250, 400)] == [plain.passes(step) for step in range(250, 400)]


def test_the_longest_run_is_planned_at_once():
    """A billion steps, as many as a recipe may have, are no work before the first."""
    longest = schedule(steps=10**9, adaptive=AdaptiveConfig(), fusion_warmup=10)
    began = time.perf_counter()
    assert longest.switch_on == 750_000_000 and longest.adaptive.floor == pytest.approx(0.12)
    assert longest.probabilities(10**9 - 1) == {2: 0.88, 3: 0.12} and longest.probabilities(749_999_999) == {1: 1.0}
    assert [longest.warming_fusion(step) for step in (749_999_999, 750_000_009, 750_000_010)] == [False, True, False]
    assert time.perf_counter() - began < 1


def test_a_phase_that_stands_twice_is_itself_twice():
    plain, deep = PHASES[0].model_copy(update={"fraction": 0.25}), Phase(fraction=0.5, passes={2: 1.0})
    assert schedule_spans([plain, deep, plain], 8) == [(0, 2, {1: 1.0}), (2, 6, {2: 1.0}), (6, 8, {1: 1.0})]
    assert [schedule([plain, deep, plain], steps=8).passes(step) for step in range(8)] == [1, 1, 2, 2, 2, 2, 1, 1]
