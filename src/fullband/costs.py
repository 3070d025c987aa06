"""What a model and a run cost, by formula: parameters, FLOPs, memory, and the compute of a feedback schedule.

FLOPs are multiply-adds times two, of matrix products and attention; norms, rotations and softmax (about 1%) are left out, and so are
the masked products that a kernel computes for nothing. Memory is what tensors hold, without the allocator's fragmentation.
Nothing here needs torch, so `fullband info` answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from fullband.config import TrunkConfig
from fullband.feedback_config import ConnectionConfig, FeedbackConfig, Phase
from fullband.spans import schedule_spans

FUSION_MATRICES: dict[str, int] = {"gated": 2, "concat": 2, "add": 1, "residual": 2, "recirculation": 0}  # of width x width
PAPER = ConnectionConfig(fusion="gated")
CHUNK_LOGITS = 2**24  # logits the training head holds at once (feedback.loss, whose number a test compares)
FLOAT32, BFLOAT16 = 4, 2  # bytes


@dataclass(frozen=True)
class Parameters:
    """Parameters by part. The embedding is also the head (tied)."""

    embedding: int
    attention: int
    glu: int
    norms: int
    head_gates: int
    fusion: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def count_parameters(trunk: TrunkConfig, connection: ConnectionConfig = PAPER) -> Parameters:
    queries, keys = trunk.heads * trunk.head_size, trunk.kv_heads * trunk.head_size
    return Parameters(
        embedding=trunk.vocab_size * trunk.width,
        attention=trunk.layers * trunk.width * (2 * queries + 2 * keys),
        glu=trunk.layers * 3 * trunk.width * trunk.glu_width,
        norms=trunk.layers * (4 * trunk.width + 2 * trunk.head_size) + 2 * trunk.width + _mixing_weights(trunk, connection),
        head_gates=trunk.layers * trunk.width * trunk.heads,
        fusion=_fusion_matrices(trunk, connection) * trunk.width**2,
    )


def _fusion_matrices(trunk: TrunkConfig, connection: ConnectionConfig) -> int:
    return FUSION_MATRICES[connection.fusion or "gated"] * len(connection.entry_depths(trunk.layers))


def _mixing_weights(trunk: TrunkConfig, connection: ConnectionConfig) -> int:
    """Scalars that mix source depths, and those that mix positions."""
    return sum(number for number in (len(connection.source_depths(trunk.layers)), connection.window) if number > 1)


@dataclass(frozen=True)
class Flops:
    """Forward FLOPs of one token in one pass."""

    matrices: float
    attention: float
    head: float
    fusion: float

    @property
    def forward(self) -> float:
        return self.matrices + self.attention + self.head + self.fusion

    @property
    def training(self) -> float:
        """Backward costs twice the forward; the head's gradient is made with its logits, so nothing is computed twice."""
        return 3 * self.forward


def pass_flops(trunk: TrunkConfig, connection: ConnectionConfig, length: int, fused: bool = False) -> Flops:
    """Of a position in a whole row of `length`, on average; of a pass with feedback, the layers above the entry. Keys are those a query may
    see, not those a tile computes."""
    return _flops(trunk, connection if fused else None, [1.0] * length, below=not fused)


def decoding_flops(trunk: TrunkConfig, connection: ConnectionConfig, context: int, fused: bool = True) -> Flops:
    """Of one decoded token that is the last of `context`."""
    return _flops(trunk, connection if fused else None, [1.0], first=context - 1)


def fusion_share(trunk: TrunkConfig, connection: ConnectionConfig, context: int) -> float:
    """The fusion's share of the FLOPs of a decoded token."""
    flops = decoding_flops(trunk, connection, context)
    return flops.fusion / flops.forward


def _flops(trunk: TrunkConfig, connection: ConnectionConfig | None, weight_T: list[float], first: int = 0, below: bool = True) -> Flops:
    """A mean over the positions from `first` on, with these weights; without the layers below the entry where `below` is false."""
    parameters = count_parameters(trunk)
    entry = 0 if below or connection is None else connection.entry_depths(trunk.layers)[0]
    share = (trunk.layers - entry) / trunk.layers
    products = 4 * trunk.heads * trunk.head_size  # FLOPs per visible key: scores and the sum over values
    return Flops(
        matrices=2 * share * (parameters.attention + parameters.head_gates + parameters.glu),
        attention=sum(products * visible_keys(window, weight_T, first) * layers for window, layers in layer_kinds(trunk, entry)),
        head=2 * trunk.vocab_size * trunk.width,
        fusion=2 * _fusion_matrices(trunk, connection) * trunk.width**2 if connection else 0,
    )


def visible_keys(window: int | None, weight_T: list[float], first: int = 0) -> float:
    """Keys a query sees, its own included: the mean over the positions from `first` on, with these weights."""
    seen = sum(weight * min(t + 1, window or t + 1) for t, weight in enumerate(weight_T, start=first))
    return seen / sum(weight_T)


def layer_kinds(trunk: TrunkConfig, first: int = 0) -> list[tuple[int | None, int]]:
    """(window, or None for full attention; number of such layers) from layer `first` on, counted from 0."""
    full = sum(trunk.layer_is_full(layer) for layer in range(first, trunk.layers))
    return [(None, full), (trunk.window, trunk.layers - first - full)]


@dataclass(frozen=True)
class RunCost:
    """The compute of a run. `token_equivalent` is section 4's accounting, tokens x passes; the rest is what the code executes.

    executed_positions   with prefix reuse, later passes compute only the positions after their prefix
    naive_flops          the same run with K full passes a batch
    """

    tokens: float
    passes: float
    token_equivalent: float
    executed_positions: float
    flops: float
    naive_flops: float


def run_cost(
    trunk: TrunkConfig,
    connection: ConnectionConfig,
    tokens: float,
    mixture: dict[int, float],
    length: int,
    feedback: FeedbackConfig,
    rows: int = 1,
) -> RunCost:
    """The expected cost of training on `tokens` with these shares of 1, 2, 3 … passes, in rows of `length`.

    `rows` of a microbatch matter where each has its own prefix: they share the shortest.
    """
    counted = positions(tokens, mixture, length, feedback, rows)
    plain, whole = (pass_flops(trunk, connection, length, fused=fused).training for fused in (False, True))
    return RunCost(
        **counted,
        flops=run_flops(trunk, connection, tokens, counted["executed_positions"], length, feedback, rows),
        naive_flops=tokens * (plain + (counted["passes"] - 1) * whole),
    )


def run_flops(
    trunk: TrunkConfig, connection: ConnectionConfig, tokens: float, executed: float, length: int, feedback: FeedbackConfig, rows: int = 1
) -> float:
    """FLOPs of training on `tokens` with `executed` positions in all passes together; those beyond the first come after their prefixes."""
    after_prefix = _flops(trunk, connection, executed_positions(length, feedback, rows), below=False).training
    return tokens * pass_flops(trunk, connection, length).training + (executed - tokens) * after_prefix


def mean_passes(mixture: dict[int, float]) -> float:
    return sum(k * share for k, share in mixture.items())


def positions(tokens: float, mixture: dict[int, float], length: int, feedback: FeedbackConfig, rows: int = 1) -> dict[str, float]:
    """What of `RunCost` does not depend on the trunk."""
    passes = mean_passes(mixture)
    fraction = sum(executed_positions(length, feedback, rows)) / length
    return {
        "tokens": tokens,
        "passes": passes,
        "token_equivalent": tokens * passes,
        "executed_positions": tokens * (1 + (passes - 1) * fraction),
    }


def executed_positions(length: int, feedback: FeedbackConfig, rows: int = 1) -> list[float]:
    """For each position, how likely a pass beyond the first computes it again; see `PassSchedule.prefixes`.

    Where the prompts of chat data are the prefix, that depends on the data: then it is at most this.
    """
    if not feedback.reuse:
        return [1.0] * length
    rounding = feedback.rounding
    if feedback.prefix in ("off", "answer"):
        return [float(rounding > 1)] + [1.0] * (length - 1)
    sharing = rows if feedback.prefix == "per-row" else 1

    def reached(t: int) -> float:
        """P(a pass starts at t or before): the multiple at or before the first position after the shortest of `sharing` prefixes,
        which are uniform over 0 … length - 2."""
        longer = max(0, length - (t // rounding + 1) * rounding) / (length - 1)
        return 1 - longer**sharing

    return [reached(t) for t in range(length)]


def pass_mixture(phases: list[Phase], steps: int | None = None, start_step: int = 0) -> dict[int, float]:
    """Number of passes -> its share of training, an adaptive schedule's changes aside."""
    mixture: dict[int, float] = {}
    for first, stop, passes in schedule_spans(phases, steps or 10**9, start_step):
        for k, probability in passes.items():
            if probability:
                mixture[k] = mixture.get(k, 0.0) + probability * (stop - first) / (steps or 10**9)
    return dict(sorted(mixture.items()))


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on the training device. Activations belong to one microbatch and vary with the prefix: `activations` at its mean length,
    `worst_activations` where it is empty."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    worst_activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations

    @property
    def worst_total(self) -> int:
        return self.total - self.activations + self.worst_activations


def training_memory(
    trunk: TrunkConfig,
    connection: ConnectionConfig,
    rows: int,
    length: int,
    passes: int,
    feedback: FeedbackConfig,
    compute_bytes: int = FLOAT32,
    activation_checkpointing: bool = False,
) -> TrainingMemory:
    """For a microbatch of `rows` x `length` positions through `passes` passes. Parameters and optimizer state are float32."""
    parameters = count_parameters(trunk, connection)
    positions = rows * length
    merged = 5 * trunk.width * FLOAT32  # what a fusion keeps: the carried state, both products, the gate, the norm's input
    share = 1 - connection.entry_depths(trunk.layers)[0] / trunk.layers  # of the layers, which a later pass runs

    def activations(fraction: float) -> int:
        fused = (passes - 1) * fraction  # positions of later passes, for each one of pass 1
        whole = _saved_per_position(trunk, compute_bytes, activation_checkpointing)
        saved = positions * (whole + fused * (whole * share + merged))
        block = positions * _saved_per_block(trunk, compute_bytes) if activation_checkpointing else 0
        keys = positions * trunk.layers * 2 * trunk.kv_heads * trunk.head_size * compute_bytes  # of pass 1, for the later passes
        logits = min(CHUNK_LOGITS, positions * trunk.vocab_size) * 3 * FLOAT32  # logits, their exponentials, their gradient
        return int(saved + block + logits + (keys if activation_checkpointing and passes > 1 else 0))

    return TrainingMemory(
        weights=parameters.total * FLOAT32,
        gradients=parameters.total * FLOAT32,
        optimizer=optimizer_elements(trunk, connection) * FLOAT32,
        activations=activations(sum(executed_positions(length, feedback, rows)) / length),
        worst_activations=activations(1.0),
    )


def optimizer_elements(trunk: TrunkConfig, connection: ConnectionConfig) -> int:
    """NorMuon: a momentum and a number per row of each matrix; Adam: two moments of the rest (and a step count per tensor, left out)."""
    parameters = count_parameters(trunk, connection)
    matrices = parameters.attention + parameters.glu + parameters.fusion
    attention_rows = (trunk.heads + 2 * trunk.kv_heads) * trunk.head_size + trunk.width
    fusion_rows = trunk.width * {"add": 1, "concat": 1, "recirculation": 0}.get(connection.fusion or "gated", 2)
    fusion_rows *= len(connection.entry_depths(trunk.layers))
    rows = trunk.layers * (attention_rows + 2 * trunk.glu_width + trunk.width) + fusion_rows
    return matrices + rows + 2 * (parameters.total - matrices)


def _saved_per_block(trunk: TrunkConfig, compute_bytes: int) -> int:
    """Bytes a block keeps of a position for backward: inputs of norms, products, attention and the GLU."""
    queries, keys = trunk.heads * trunk.head_size, trunk.kv_heads * trunk.head_size
    kept = 4 * trunk.width + 5 * queries + 3 * keys + 4 * trunk.glu_width + 3 * trunk.heads
    return kept * compute_bytes + 2 * trunk.width * FLOAT32  # the residual stream stays float32


def _saved_per_position(trunk: TrunkConfig, compute_bytes: int, activation_checkpointing: bool) -> int:
    """Bytes the trunk keeps of a position: its blocks, or only their inputs; the first and the last norm's inputs."""
    block = trunk.width * FLOAT32 if activation_checkpointing else _saved_per_block(trunk, compute_bytes)
    return trunk.layers * block + 2 * trunk.width * FLOAT32


@dataclass(frozen=True)
class DecodingMemory:
    """Bytes while decoding: weights, and the keys and values of `context` positions in every row (growing, they may take twice that)."""

    weights: int
    cache: int

    @property
    def total(self) -> int:
        return self.weights + self.cache


def decoding_memory(
    trunk: TrunkConfig, connection: ConnectionConfig, context: int, rows: int = 1, dtype_bytes: int = BFLOAT16
) -> DecodingMemory:
    """Sliding layers keep only what a later token can see: the window without its own key. States: one for each carried position."""
    slots = sum(layers * (context if window is None else min(context, window - 1)) for window, layers in layer_kinds(trunk))
    cache = rows * (2 * trunk.kv_heads * trunk.head_size * slots + connection.window * trunk.width) * dtype_bytes
    return DecodingMemory(count_parameters(trunk, connection).total * dtype_bytes, cache)
