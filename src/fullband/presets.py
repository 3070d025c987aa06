"""Named shapes: the paper's own (App. A) and small ones for real machines. Named schedules are in `feedback_config`."""

from __future__ import annotations

from fullband.config import ModelConfig, TrunkConfig, parse
from fullband.strict import named

TRUNKS: dict[str, TrunkConfig] = {
    # App. A; the head dimension is 1536 / 16 = 96
    "paper-1b": TrunkConfig(vocab_size=100_352, width=1536, layers=24, heads=16, kv_heads=8, glu_width=6656, context=8192, window=2048),
    "100m": TrunkConfig(vocab_size=50_304, width=576, layers=12, heads=6, kv_heads=3, glu_width=2496, context=4096, window=1024),
    "10m": TrunkConfig(vocab_size=8192, width=288, layers=6, heads=3, kv_heads=1, glu_width=1248, context=2048, window=512),
    "tiny": TrunkConfig(vocab_size=320, width=64, layers=2, heads=4, kv_heads=2, glu_width=256, context=512, window=128, full_every=2),
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
    return named(TRUNKS, name, "model preset")
