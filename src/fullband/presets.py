"""Named shapes and schedules: the paper's own (App. A, the table of section 4) and small ones for real machines."""

from __future__ import annotations

import difflib
from typing import TypeVar

from fullband.config import ModelConfig, TrunkConfig, parse
from fullband.feedback_config import Phase

TRUNKS: dict[str, TrunkConfig] = {
    # App. A; the head dimension is 1536 / 16 = 96
    "paper-1b": TrunkConfig(vocab_size=100_352, width=1536, layers=24, heads=16, kv_heads=8, glu_width=6656, context=8192, window=2048),
    "100m": TrunkConfig(vocab_size=50_304, width=576, layers=12, heads=6, kv_heads=3, glu_width=2496, context=4096, window=1024),
    "10m": TrunkConfig(vocab_size=8192, width=288, layers=6, heads=3, kv_heads=1, glu_width=1248, context=2048, window=512),
    "tiny": TrunkConfig(vocab_size=320, width=64, layers=2, heads=4, kv_heads=2, glu_width=256, context=512, window=128, full_every=2),
}

# The table of section 4. "75% one-pass, 22% two-pass, 3% three-pass" is read as: feedback is introduced for the last quarter,
# in which 12% of the batches take three passes (0.25 x 0.12 = 3% of training).
SCHEDULES: dict[str, list[Phase]] = {
    "none": [Phase(fraction=1.0, passes={1: 1.0})],
    "paper-10b": [Phase(fraction=1.0, passes={3: 1.0})],
    "paper-100b": [Phase(fraction=0.75, passes={1: 1.0}), Phase(fraction=0.25, passes={3: 1.0})],
    "paper-200b": [Phase(fraction=0.75, passes={1: 1.0}), Phase(fraction=0.25, passes={2: 0.88, 3: 0.12})],
    "paper-400b": [Phase(fraction=0.75, passes={1: 1.0}), Phase(fraction=0.25, passes={2: 0.88, 3: 0.12})],
    # Fig. 3, green: no three-pass batches; it diverges past its trained depth in the paper
    "paper-two-pass": [Phase(fraction=0.75, passes={1: 1.0}), Phase(fraction=0.25, passes={2: 1.0})],
    # long-context extension and instruction tuning (section 4.2)
    "three-pass": [Phase(fraction=1.0, passes={3: 1.0})],
}

PAPER_RUNS: dict[str, float] = {"paper-10b": 10e9, "paper-100b": 100e9, "paper-200b": 200e9, "paper-400b": 400e9}  # tokens


def resolve_trunk(model: ModelConfig, vocab_size: int | None = None) -> TrunkConfig:
    """The trunk of a recipe: its preset, with a tokenizer's `vocab_size` in place of the preset's own, the overrides and the context
    extension on top.

    Raises ValueError for an unknown preset or a shape that does not fit.
    """
    if isinstance(model.trunk, TrunkConfig):
        return extend_context(model.trunk, model)
    base = trunk_preset(model.preset).model_dump() if model.preset else {}
    if vocab_size is not None:
        multiple = 128 if vocab_size > 1024 else 1  # cl100k's 100,277 ids become the paper's 100,352
        base["vocab_size"] = -(-vocab_size // multiple) * multiple
    return extend_context(parse(TrunkConfig, base | model.trunk, "model.trunk"), model)


def extend_context(trunk: TrunkConfig, model: ModelConfig) -> TrunkConfig:
    """`trunk` with the recipe's `model.rope_base`, `model.rope` and `model.context`. Raises ValueError if they do not fit it."""
    context = model.context or (model.rope.context if model.rope else None)
    changes = {"rope_base": model.rope_base, "rope": model.rope, "context": context}
    given = {key: value for key, value in changes.items() if value is not None}
    return parse(TrunkConfig, trunk.model_dump() | given, "model") if given else trunk


def trunk_preset(name: str) -> TrunkConfig:
    """The named shape; ValueError naming the nearest one if there is none."""
    return _named(TRUNKS, name, "model preset")


def resolve_schedule(schedule: str | list[Phase]) -> list[Phase]:
    """The phases of a recipe; their fractions must sum to 1. Raises ValueError."""
    phases = _named(SCHEDULES, schedule, "schedule") if isinstance(schedule, str) else schedule
    if abs(sum(phase.fraction for phase in phases) - 1) > 1e-6:
        raise ValueError(f"feedback.schedule: fractions must sum to 1, got {sum(p.fraction for p in phases):g}")
    return phases


Value = TypeVar("Value")


def _named(table: dict[str, Value], name: str, what: str) -> Value:
    if name not in table:
        nearest = difflib.get_close_matches(name, table, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown {what} '{name}'; did you mean '{nearest}'? (known: {', '.join(table)})")
    return table[name]
