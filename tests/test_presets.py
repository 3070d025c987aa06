"""Presets are what they are named after."""

import pytest

from fullband.config import ModelConfig, TrunkConfig
from fullband.feedback_config import SCHEDULES, FeedbackConfig, Phase
from fullband.presets import PAPER_RUNS, TRUNKS, resolve_trunk, trunk_preset


@pytest.mark.parametrize("name", TRUNKS)
def test_every_shape_resolves(name):
    assert resolve_trunk(ModelConfig(preset=name)) == TRUNKS[name]
    smaller = resolve_trunk(ModelConfig(preset=name, trunk={"layers": 3, "context": 99}), vocab_size=257)
    assert (smaller.layers, smaller.context, smaller.vocab_size, smaller.width) == (3, 99, 257, TRUNKS[name].width)
    assert any(TRUNKS[name].layer_is_full(i) for i in range(TRUNKS[name].layers))


def test_paper_1b_is_appendix_a():
    shape = TRUNKS["paper-1b"]
    assert (shape.vocab_size, shape.layers, shape.width, shape.glu_width) == (100_352, 24, 1536, 6656)
    assert (shape.heads, shape.kv_heads, shape.head_size, shape.context, shape.window) == (16, 8, 96, 8192, 2048)
    assert [i for i in range(1, 25) if shape.layer_is_full(i - 1)] == [6, 12, 18, 24]


def test_a_tokenizer_fills_in_the_vocabulary_and_an_override_wins():
    assert resolve_trunk(ModelConfig(preset="paper-1b"), 100_277).vocab_size == 100_352
    assert resolve_trunk(ModelConfig(preset="tiny"), 257).vocab_size == 257
    assert resolve_trunk(ModelConfig(preset="tiny", trunk={"vocab_size": 999}), 257).vocab_size == 999


def test_a_whole_shape_needs_no_preset():
    shape = TRUNKS["tiny"].model_dump()
    assert resolve_trunk(ModelConfig(trunk=shape)) == TRUNKS["tiny"] == resolve_trunk(ModelConfig(trunk=TrunkConfig(**shape)))
    with pytest.raises(ValueError, match=r"^model\.trunk: .*: required"):
        resolve_trunk(ModelConfig(trunk={"layers": 3}))
    with pytest.raises(ValueError, match=r"^model\.trunk: widht: unknown key; did you mean 'width'\?$"):
        resolve_trunk(ModelConfig(preset="tiny", trunk={"widht": 3}))
    with pytest.raises(ValueError, match=r"heads \(4\) must be a multiple of kv_heads \(3\)"):
        resolve_trunk(ModelConfig(preset="tiny", trunk={"kv_heads": 3}))


def test_unknown_names_name_the_nearest():
    with pytest.raises(ValueError, match=r"unknown model preset 'papr-1b'; did you mean 'paper-1b'\?"):
        trunk_preset("papr-1b")
    with pytest.raises(ValueError, match=r"unknown schedule 'paper-200'; did you mean 'paper-200b'\?"):
        _ = FeedbackConfig(schedule="paper-200").phases
    with pytest.raises(ValueError, match=r"feedback\.schedule: fractions must sum to 1, got 0\.5"):
        _ = FeedbackConfig(schedule=[Phase(fraction=0.5, passes={1: 1.0})]).phases


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_a_whole_training(name):
    assert sum(phase.fraction for phase in FeedbackConfig(schedule=name).phases) == pytest.approx(1)


@pytest.mark.parametrize("name, compute", [("paper-10b", 30e9), ("paper-100b", 150e9), ("paper-200b", 256e9), ("paper-400b", 512e9)])
def test_schedules_of_section_4_cost_what_the_rule_says(name, compute):
    """Tokens x passes. The paper's own figure for 10B, 40B, does not follow from its rule."""
    passes = sum(phase.fraction * k * share for phase in SCHEDULES[name] for k, share in phase.passes.items())
    assert passes * PAPER_RUNS[name] == pytest.approx(compute)
