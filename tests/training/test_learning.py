"""Training trains: losses fall on a task and on real text, for plain and for later passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fullband.config import Recipe
from fullband.data.batch import IGNORE
from fullband.data.build import build_loader
from fullband.training import train
from fullband.training.metrics import read_metrics

MakeRecipe = Callable[..., Recipe]
TRUNK = {"width": 32, "layers": 2, "heads": 2, "kv_heads": 1, "glu_width": 64, "context": 64, "window": 32, "full_every": 2}


def test_a_word_problem_is_learned(recipe: MakeRecipe) -> None:
    """S3 over four letters: from ln 6 = 1.79 nats down in both passes, in training and on held-out words."""
    config = recipe(
        model__trunk=TRUNK,
        data__length=4,
        optim={"warmup_steps": 10, "adam_lr": 1e-2},
        train={"steps": 120, "batch_rows": 32, "log_every": 1, "device": "cpu"},
        evaluation={"every": 1000, "rows": 64, "feedback_passes": [0, 1]},
    )
    result = train(config)
    entries = [e for e in read_metrics(Path(config.output or "") / "metrics.jsonl") if "objective" in e]
    for name in ("loss_pass_1", "loss_pass_2"):
        first, last = (sum(e[name] for e in part) / 5 for part in (entries[:5], entries[-5:]))
        assert first > 1.6 and last < 1.2, name
    assert max(result.validation.values()) < 1.2


@pytest.mark.slow
def test_real_text_is_learned(recipe: MakeRecipe) -> None:
    """Held-out Python source is read better than any model could that looks at nothing (the entropy of these very bytes)."""
    config = recipe(
        model__trunk=TRUNK,
        data={"source": {"kind": "python-stdlib"}, "length": 64},
        feedback__start_step=100,
        optim={"warmup_steps": 10, "adam_lr": 3e-2, "matrix_lr": 2e-2},
        train={"steps": 200, "batch_rows": 8, "log_every": 1, "device": "cpu"},
        evaluation={"every": 1000, "rows": 64, "feedback_passes": [0, 1]},
    )
    result = train(config)
    loader = build_loader(config.data, config.seed, config.train.batch_rows)
    targets = torch.cat([batch.targets.flatten() for batch in loader.validation_batches(64, 16)])
    shares = torch.bincount(targets[targets != IGNORE]).double() / int((targets != IGNORE).sum())
    entropy = -float(torch.special.xlogy(shares, shares).sum())
    assert 3.0 < entropy < 3.7
    assert result.validation["0"] < entropy - 0.15
    # the second pass begins far worse (the switch-on shock) and has come part of the way
    assert result.milestones.shock is not None and result.milestones.mean_difference is not None
    assert result.validation["1"] - result.validation["0"] < 0.7 * result.milestones.shock
