"""What `info` and `train --dry-run` say, as plain data."""

from __future__ import annotations

from typing import Any

from fullband import costs
from fullband.config import Recipe, TrunkConfig
from fullband.feedback_config import SCHEDULES, ConnectionConfig, FeedbackConfig
from fullband.presets import PAPER_RUNS
from fullband.spans import schedule_spans

PAPER_TRUNK, PAPER_LENGTH = "paper-1b", 8192
# The last column of the table in section 4. The first row does not follow the paper's own rule, tokens x passes: that is 30B.
PAPER_PRINTS = {"paper-10b": 40e9, "paper-100b": 150e9, "paper-200b": 256e9, "paper-400b": 512e9}
BYTES = {"float32": costs.FLOAT32, "bfloat16": costs.BFLOAT16}


def describe_model(trunk: TrunkConfig, connection: ConnectionConfig, length: int) -> dict[str, Any]:
    """Shape, parameters by part, FLOPs of a token in rows of `length`, and decoding at the whole context."""
    parameters = costs.count_parameters(trunk, connection)
    return {
        "shape": trunk.model_dump() | {"head_dim": trunk.head_size, "full_layers": full_layers(trunk)},
        "fusion": connection.fusion,
        "connection": connection.model_dump(),
        "parameters": vars(parameters) | {"total": parameters.total},
        "flops_per_token_and_pass": {
            "length": length,
            "plain": flops(costs.pass_flops(trunk, connection, length)),
            "fused": flops(costs.pass_flops(trunk, connection, length, fused=True)),
        },
        "decoding": {
            "context": trunk.context,
            "flops_per_token": flops(costs.decoding_flops(trunk, connection, trunk.context)),
            "fusion_share": costs.fusion_share(trunk, connection, trunk.context),
            "memory": {name: decoding_memory(trunk, connection, size) for name, size in BYTES.items()},
        },
    }


def describe_converted(model: Any, recipe: Recipe) -> dict[str, Any]:
    """A model with a Hugging Face trunk: where it comes from, and what is counted rather than computed by formula."""
    return {
        "source": recipe.train.initial_checkpoint or recipe.model.source,
        "type": model.config.trunk_config.model_type,
        "fusion": model.connection.config.fusion,
        "context": model.trunk.context,
        "parameters": {
            "total": sum(p.numel() for p in model.parameters()),
            "fusion": sum(p.numel() for p in model.connection.parameters()),
        },
    }


def full_layers(trunk: TrunkConfig) -> list[int]:
    """Layers that attend fully, counted from 1."""
    return [layer + 1 for layer in range(trunk.layers) if trunk.layer_is_full(layer)]


def flops(counted: costs.Flops) -> dict[str, float]:
    return vars(counted) | {"forward": counted.forward, "training": counted.training}


def decoding_memory(trunk: TrunkConfig, connection: ConnectionConfig, dtype_bytes: int) -> dict[str, int]:
    memory = costs.decoding_memory(trunk, connection, trunk.context, dtype_bytes=dtype_bytes)
    return {"weights": memory.weights, "cache_per_row": memory.cache, "total": memory.total}


def describe_training_memory(
    trunk: TrunkConfig,
    connection: ConnectionConfig,
    rows: int,
    length: int,
    dtype: str,
    passes: list[int],
    feedback: FeedbackConfig,
    activation_checkpointing: bool = False,
) -> dict[str, Any]:
    """For a microbatch, by number of passes."""
    by_passes = {}
    for k in passes:
        memory = costs.training_memory(trunk, connection, rows, length, k, feedback, BYTES[dtype], activation_checkpointing)
        by_passes[k] = vars(memory) | {"total": memory.total, "worst_total": memory.worst_total}
    return {
        "rows": rows,
        "length": length,
        "dtype": dtype,
        "activation_checkpointing": activation_checkpointing,
        "passes": by_passes,
    }


def describe_run(recipe: Recipe, trunk: TrunkConfig | None, feedback: FeedbackConfig) -> dict[str, Any]:
    """Schedule, compute and memory of a recipe, without FLOPs and memory for a Hugging Face trunk (None). `feedback` is the recipe's, with
    its later passes starting at few places if blocks are compiled."""
    from fullband.optim.wsd import warmup_length

    train, length, connection = recipe.train, recipe.data.length, recipe.connection
    phases = feedback.phases
    mixture = costs.pass_mixture(phases, train.steps, feedback.start_step)
    rows = train.microbatch_rows or train.batch_rows
    tokens_per_step = train.batch_rows * length
    described = {
        "name": recipe.name,
        "seed": recipe.seed,
        "folder": str(recipe.folder),
        "steps": train.steps,
        "tokens_per_step": tokens_per_step,
        "schedule": [
            {"first_step": first, "stop_step": stop, "passes": passes}
            for first, stop, passes in schedule_spans(phases, train.steps, feedback.start_step)
        ],
        "adaptive": feedback.adaptive is not None,
        "warmup": {"steps": warmup_length(train.steps, recipe.optim.warmup_steps), "in_recipe": recipe.optim.warmup_steps},
        "mixture": mixture,
    }
    tokens = train.steps * tokens_per_step
    if trunk is None:
        return described | {"cost": costs.positions(tokens, mixture, length, feedback, rows)}
    return described | {
        "cost": vars(costs.run_cost(trunk, connection, tokens, mixture, length, feedback, rows)),
        "training_memory": describe_training_memory(
            trunk, connection, rows, length, train.dtype, sorted(mixture), feedback, train.activation_checkpointing
        ),
    }


def preset_feedback(name: str) -> FeedbackConfig:
    """What a preset's costs are counted with: the paper's model is compiled, as its recipes say, the small ones are not."""
    return FeedbackConfig().compiled(PAPER_LENGTH) if name == PAPER_TRUNK else FeedbackConfig()


def describe_paper_runs(trunk: TrunkConfig) -> list[dict[str, Any]]:
    """The table of section 4, with what its runs cost: computed, not quoted."""
    runs = []
    for name, tokens in PAPER_RUNS.items():
        mixture = costs.pass_mixture(SCHEDULES[name])
        cost = costs.run_cost(trunk, costs.PAPER, tokens, mixture, PAPER_LENGTH, preset_feedback(PAPER_TRUNK))
        runs.append({"run": name, "mixture": mixture, "cost": vars(cost), "paper_prints": PAPER_PRINTS[name]})
    return runs
