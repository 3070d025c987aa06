"""The warm-up, stable, decay schedule of section 4: 200 steps up, constant, the last quarter down to zero.

Steps count from 0; a run of `steps` steps executes 0 .. steps - 1.
"""

from __future__ import annotations

import math
from typing import Literal

CooldownShape = Literal["linear", "1-sqrt"]

# A warm-up longer than a third of the run is cut to it: a recipe's 200 steps must not swallow a trial run of 100.
SHORTEST_RUN_IN_WARMUPS = 3


def wsd_factor(step: int, steps: int, warmup_steps: int, cooldown: float, shape: CooldownShape = "linear") -> float:
    """Factor on the learning rates at `step`, in [0, 1].

    Warm-up: (step + 1) / w with w = `warmup_length`, so the first step moves and step w - 1 is the first at 1.
    Cooldown over the last round(cooldown x steps) steps: with x the share of it that has passed, 1 - x (`linear`) or 1 - sqrt(x) (`1-sqrt`,
    arXiv:2405.18392); it leaves 1 on its second step and reaches 0 at `steps`, after the last. Where both apply, the smaller counts.

    Raises ValueError for an unknown shape, a negative step, no steps or a cooldown outside [0, 1].
    """
    if steps < 1 or step < 0 or warmup_steps < 0:
        raise ValueError(f"schedule: step {step} of {steps} with {warmup_steps} warm-up steps is not a run")
    start = cooldown_start(steps, cooldown)
    if shape not in ("linear", "1-sqrt"):
        raise ValueError(f"schedule: cooldown shape must be 'linear' or '1-sqrt' (given: {shape!r})")
    if step >= steps:
        return 0.0 if cooldown > 0 else 1.0
    warmup = warmup_length(steps, warmup_steps)
    rising = (step + 1) / warmup if step < warmup else 1.0
    passed = (step - start) / (steps - start) if step > start else 0.0
    falling = 1 - passed if shape == "linear" else 1 - math.sqrt(passed)
    return min(rising, falling)


def warmup_length(steps: int, warmup_steps: int) -> int:
    """The steps that a run of `steps` warms up: at most a third of it."""
    return min(warmup_steps, steps // SHORTEST_RUN_IN_WARMUPS)


def warmup_words(steps: int, warmup_steps: int) -> str:
    """How long the warm-up is, and that it was cut, if it was."""
    length = warmup_length(steps, warmup_steps)
    counted = f"the learning rates warm up over {length:,} step{'' if length == 1 else 's'}"
    return counted if length == warmup_steps else f"{counted}, a third of the run, not optim.warmup_steps={warmup_steps:,}"


def cooldown_start(steps: int, cooldown: float) -> int:
    """The first step of the cooldown; `steps` if there is none. Raises ValueError for a cooldown outside [0, 1]."""
    if not 0 <= cooldown <= 1:
        raise ValueError(f"schedule: cooldown is the last fraction of training, in [0, 1] (given: {cooldown})")
    return steps - round(cooldown * steps)


def in_cooldown(step: int, steps: int, cooldown: float) -> bool:
    """Whether `step` lies in the cooldown, where the z-loss is on."""
    return step >= cooldown_start(steps, cooldown) and cooldown > 0
