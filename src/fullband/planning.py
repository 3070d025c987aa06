"""Whether and how a run fits hardware: memory, communication and time of a step on n GPUs, by formula. Nothing is run.

Weights, gradients and optimizer state are cut over all GPUs (FSDP2 by layers, the rest one unit that stays gathered through a step).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fullband import costs
from fullband.config import Recipe, TrunkConfig

USABLE = 0.9  # of a GPU's memory: the rest is the allocator's fragmentation, the driver and communication buffers
ACROSS = 50e9  # bytes a second and GPU between machines of 8: one 400 Gb/s adapter for each


@dataclass(frozen=True)
class Gpu:
    """flops: bfloat16, dense, FLOP/s. memory: bytes. link: bytes a second to the others of a machine, one way."""

    flops: float
    memory: float
    link: float
    source: str


GPUS = {
    "h200": Gpu(989e12, 141e9, 450e9, "NVIDIA H200 SXM data sheet: dense half of 1,979 TFLOPS; NVLink 900 GB/s both ways"),
    "h100": Gpu(989e12, 80e9, 450e9, "NVIDIA H100 SXM data sheet: dense half of 1,979 TFLOPS; NVLink 900 GB/s both ways"),
    "a100": Gpu(312e12, 80e9, 300e9, "NVIDIA A100 80GB SXM data sheet: 312 TFLOPS; NVLink 600 GB/s both ways"),
    "l40s": Gpu(362e12, 48e9, 32e9, "NVIDIA L40S data sheet: 362 TFLOPS dense; PCIe 4.0 x16"),
    "rtx4090": Gpu(165e12, 24e9, 32e9, "NVIDIA Ada white paper: 165 TFLOPS dense with float32 sums; PCIe 4.0 x16"),
}


def communication(trunk: TrunkConfig, recipe: Recipe, gpus: int, passes: int, microbatches: int) -> dict[str, float]:
    """Bytes of a step's whole tensors, on one process: gathered weights, gradients to be summed, NorMuon's two exchanges (the mean of
    the processes). With `parallel.reshard` a layer is gathered for each pass, forward and backward; else once, and for each backward
    but the first. A process sends and receives (n - 1)/n of them."""
    if gpus == 1:
        return {"all_gather": 0, "reduce_scatter": 0, "normuon": 0}
    parameters = costs.count_parameters(trunk, recipe.connection)
    layers = parameters.attention + parameters.glu + parameters.head_gates + trunk.layers * (4 * trunk.width + 2 * trunk.head_size)
    root = parameters.total - layers
    wire = costs.BFLOAT16 if recipe.train.dtype == "bfloat16" else costs.FLOAT32
    reshard = recipe.parallel is None or recipe.parallel.reshard
    unused = parameters.fusion if passes == 1 else 0  # the connection has no gradient then
    matrices = parameters.attention + parameters.glu + parameters.fusion
    rows = costs.optimizer_elements(trunk, recipe.connection) - matrices - 2 * (parameters.total - matrices)
    exchanged = 2 * matrices + 3 * rows - (2 * unused + 3 * 2 * trunk.width if unused and recipe.connection.fusion == "gated" else 0)
    return {
        "all_gather": microbatches * (layers * wire * passes * (2 if reshard else 1) + root * costs.FLOAT32),
        "reduce_scatter": microbatches * (layers + root - unused) * costs.FLOAT32,
        "normuon": exchanged * costs.FLOAT32 / gpus if recipe.optim.kind == "normuon" else 0,
    }


def memory(trunk: TrunkConfig, recipe: Recipe, gpus: int, rows: int, passes: int, checkpointing: bool, reuse: bool) -> dict[str, float]:
    """Bytes on one GPU, activations where the prefix is empty."""
    feedback = recipe.compiled_feedback.model_copy(update={"reuse": reuse})
    dtype = costs.BFLOAT16 if recipe.train.dtype == "bfloat16" else costs.FLOAT32
    held = costs.training_memory(trunk, recipe.connection, rows, recipe.data.length, passes, feedback, dtype, checkpointing)
    parameters = costs.count_parameters(trunk, recipe.connection)
    gathered = 0.0
    if gpus > 1:  # the rest with its gradient, and two layers: one is gathered while the other is computed
        rest = parameters.embedding + parameters.fusion
        gathered = 2 * rest * costs.FLOAT32 + 2 * (parameters.attention + parameters.glu) / trunk.layers * (dtype + costs.FLOAT32)
    logits = min(costs.CHUNK_LOGITS, rows * recipe.data.length * trunk.vocab_size) * 3 * costs.FLOAT32
    parts = {
        "weights": held.weights / gpus,
        "gradients": held.gradients / gpus,
        "optimizer": held.optimizer / gpus,
        "gathered": gathered,
        "activations": held.worst_activations - logits,
        "logits": logits,
    }
    return parts | {"total": sum(parts.values()), "mean_prefix": sum(parts.values()) - held.worst_activations + held.activations}


def plan(
    recipe: Recipe, trunk: TrunkConfig, gpus: int, gpu: str, mfu: float, price_per_hour: float | None = None, rows: int | None = None
) -> dict[str, Any]:
    """A run of `recipe` on `gpus` GPUs. `rows`: sequences of a microbatch on one GPU; default: the recipe's, at least one.

    Raises ValueError for an unknown GPU and numbers out of range.
    """
    if gpu not in GPUS:
        raise ValueError(f"--gpu must be one of {', '.join(GPUS)}, got {gpu}")
    if not 0 < mfu <= 1 or gpus < 1 or (rows is not None and rows < 1) or (price_per_hour is not None and price_per_hour < 0):
        raise ValueError("--gpus and --rows must be at least 1, --mfu above 0 and at most 1, --price-per-hour not negative")
    device, length = GPUS[gpu], recipe.data.length
    rows = rows or max(1, (recipe.train.microbatch_rows or recipe.train.batch_rows) // gpus)
    together = rows * gpus
    batch = -(-recipe.train.batch_rows // together) * together
    steps = -(-recipe.train.steps * recipe.train.batch_rows // batch)
    changes = {"train.batch_rows": batch, "train.steps": steps, "train.microbatch_rows": together}
    settings = [f"{key}={value}" for key, value in changes.items() if value != getattr(recipe.train, key.partition(".")[2])]
    feedback = recipe.compiled_feedback
    mixture = costs.pass_mixture(feedback.phases, recipe.train.steps, feedback.start_step)
    deepest, checkpointing = max(mixture), recipe.train.activation_checkpointing
    by_setting = [
        {"passes": k, "checkpointing": c, "reuse": r, **memory(trunk, recipe, gpus, rows, k, c, r)}
        for k in mixture
        for c in (False, True)
        for r in ((True, False) if k > 1 else (feedback.reuse,))
    ]
    needed = memory(trunk, recipe, gpus, rows, deepest, checkpointing, feedback.reuse)
    room = USABLE * device.memory
    cost = costs.run_cost(trunk, recipe.connection, steps * batch * length, mixture, length, feedback, rows)
    recomputed = 4 / 3 if checkpointing else 1.0
    compute = cost.flops * recomputed / steps / gpus / (device.flops * mfu)
    sent = {k: communication(trunk, recipe, gpus, k, batch // together) for k in mixture}
    link = device.link if gpus <= 8 else min(device.link, ACROSS)
    traffic = sum(share * sum(sent[k].values()) for k, share in mixture.items()) * (gpus - 1) / gpus / link
    step = max(compute, traffic)
    hours = step * steps / 3600
    return {
        "gpu": gpu, "gpus": gpus, "source": device.source, "mfu_assumed": mfu, "rows_per_gpu": rows, "settings": settings,
        "memory": by_setting, "needed": needed, "room": room, "fits": needed["total"] <= room,
        "changes": [] if needed["total"] <= room else changes_that_fit(trunk, recipe, gpus, rows, deepest, room),
        "communication": sent, "compute_seconds": compute, "communication_seconds": traffic, "step_seconds": step, "steps": steps,
        "tokens_per_second": batch * length / step, "mfu": cost.flops / steps / gpus / device.flops / step, "days": hours / 24,
        "cost": None if price_per_hour is None else hours * gpus * price_per_hour,
    }  # fmt: skip


def changes_that_fit(trunk: TrunkConfig, recipe: Recipe, gpus: int, rows: int, passes: int, room: float) -> list[str]:
    """Single changes, each computed, that make the deepest step fit."""
    checkpointing, reuse = recipe.train.activation_checkpointing, recipe.compiled_feedback.reuse

    def fits(gpus: int, rows: int, checkpointing: bool) -> bool:
        return memory(trunk, recipe, gpus, rows, passes, checkpointing, reuse)["total"] <= room

    found = []
    if not checkpointing and fits(gpus, rows, True):
        found.append("train.activation_checkpointing=true")
    if fewer := next((r for r in range(rows - 1, 0, -1) if fits(gpus, r, checkpointing)), None):
        found.append(f"train.microbatch_rows={fewer * gpus} ({fewer} on each GPU)")
    if more := next((gpus * 2**n for n in range(1, 11) if fits(gpus * 2**n, rows, checkpointing)), None):
        found.append(f"--gpus {more} with as many rows on each")
    return found or ["none of checkpointing, fewer rows and more GPUs is enough alone: try several, a shorter data.length or another --gpu"]
