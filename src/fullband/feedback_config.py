"""The feedback section of a recipe: what is fed back and where, and how passes are trained."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Union

from pydantic import Field, field_validator, model_validator

from fullband.strict import Strict, named

MOST_STEPS, MOST_PASSES, MOST_TRAINED = 10**9, 10**5, 256  # above which a number is a slip, not a plan
FusionName = Literal["gated", "concat", "add", "residual", "recirculation"]
SourceName = Literal["top", "middle", "first", "mix"]
Depth = Annotated[int, Field(ge=0, le=4096)]
Control = Literal["none", "zeroed", "shuffled", "constant-gate"]
FeedbackPasses = Union[Annotated[int, Field(ge=0, le=MOST_PASSES)], Literal["exact", "converged"]]  # 0 = without feedback


def parse_feedback_passes(text: str, setting: str = "feedback_passes") -> FeedbackPasses:
    """0, 1, 2, …, exact or converged. Raises ValueError, naming the `setting`."""
    word = text.strip()
    if word == "exact":
        return "exact"
    if word == "converged":
        return "converged"
    if word.isascii() and word.isdecimal():
        return int(word)
    raise ValueError(f"{setting}: must be 0, 1, 2, …, exact or converged, got '{text}'")


class ConnectionConfig(Strict):
    """Which state is fed back, and where it enters (Eq. 4, section 5). Depth 0 is the input of the stack, depth d the output of layer d."""

    fusion: FusionName | None = Field(default=None, description="how it is merged; default: gated, residual where a model is converted")
    source: SourceName | Depth | list[Depth] = Field(
        default="top", description="depth of the carried state, several are mixed with learned weights; top = after the final norm"
    )
    entry: Literal["middle"] | Depth | list[Depth] = Field(default=0, description="depth where it enters, or several; ascending")
    window: int = Field(default=1, ge=1, le=4096, description="positions whose states are carried, mixed with learned weights")

    def source_depths(self, layers: int) -> tuple[int, ...]:
        """Of a stack of `layers` layers; () = the top state."""
        named = {"top": [], "first": [1], "middle": [(layers + 1) // 2], "mix": range(layers + 1)}
        return tuple(named[self.source] if isinstance(self.source, str) else [self.source] if isinstance(self.source, int) else self.source)

    def entry_depths(self, layers: int) -> tuple[int, ...]:
        """Of a stack of `layers` layers."""
        if self.entry == "middle":
            return (layers // 2,)
        return (self.entry,) if isinstance(self.entry, int) else tuple(self.entry)

    @field_validator("source", "entry")
    @classmethod
    def _depths_ascend(cls, depths: Any) -> Any:
        if isinstance(depths, list) and (not depths or depths != sorted(set(depths))):
            raise ValueError(f"depths must ascend, got {depths}")
        return depths

    def named(self, default: FusionName) -> ConnectionConfig:
        """The same with a fusion."""
        return self if self.fusion else self.model_copy(update={"fusion": default})


def moved_fusion(raw: Any) -> Any:
    """A recipe as it was written before connections, in today's keys: `model.fusion` and `model.trunk.fed_back` are parts of one."""
    if not isinstance(raw, dict) or not isinstance(raw.get("model"), dict):
        return raw
    model = dict(raw["model"])
    trunk = dict(model["trunk"]) if isinstance(model.get("trunk"), dict) else None
    found = {"fusion": model.pop("fusion", None), "source": (trunk or {}).pop("fed_back", None)}
    found = {key: value for key, value in found.items() if value is not None}
    if not found and trunk == model.get("trunk"):
        return {**raw, "model": model}
    if trunk is not None:
        model["trunk"] = trunk
    feedback = dict(raw.get("feedback") or {})
    if found:
        feedback["connection"] = {**(feedback.get("connection") or {}), **found}
    return {**raw, "model": model, "feedback": feedback}


class Phase(Strict):
    """For `fraction` of training, draw the number of passes with these probabilities: {1: 0.75, 2: 0.25}."""

    fraction: float = Field(gt=0, le=1, description="fraction of training; the phases must sum to 1")
    passes: dict[int, float] = Field(description="probability of each number of passes, the first included; they must sum to 1")

    @model_validator(mode="after")
    def _is_distribution(self) -> Phase:
        for k, probability in self.passes.items():
            if k < 1:
                raise ValueError(f"passes: numbers of passes must be at least 1 (1 = without feedback), got {k}")
            if k > MOST_TRAINED:
                raise ValueError(f"passes: numbers of passes must be at most {MOST_TRAINED}, got {k}")
            if probability < 0:
                raise ValueError(f"passes: probabilities must not be negative, got {probability} for {k} passes")
        if abs(sum(self.passes.values()) - 1) > 1e-6:
            raise ValueError(f"passes: probabilities must sum to 1, got {sum(self.passes.values()):g}")
        return self


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


class AdaptiveConfig(Strict):
    """Raise the share of deeper passes while the states do not settle (the paper's limitation 2)."""

    every: int = Field(default=100, gt=0, le=MOST_STEPS, description="steps between measurements")
    passes: int = Field(default=12, ge=8, le=16, description="passes of one measurement, without gradients")
    rows: int = Field(default=8, gt=0, le=2**20, description="sequences in a measurement")
    tolerance: float = Field(default=1e-2, gt=0, le=10, description="relative change of a state below which it counts as settled")
    ratio: float = Field(
        default=0.9, gt=0, le=10, description="change ratio (median or 99th percentile) above which the share of deeper passes rises"
    )
    growth: float = Field(
        default=2.0,
        gt=1,
        le=1e3,
        description="factor by which the share of deeper passes rises; it falls by the square root of this factor",
    )
    floor: float = Field(
        default=0.03, gt=0, le=1, description="smallest share of deeper passes among all batches of the run; at most the ceiling"
    )
    ceiling: float = Field(default=0.5, gt=0, le=1, description="largest share of deeper passes among the batches with feedback")

    @model_validator(mode="after")
    def _floor_is_below(self) -> AdaptiveConfig:
        if self.floor > self.ceiling:
            raise ValueError(f"floor must be at most the ceiling ({self.ceiling}), got {self.floor}")
        return self


class FeedbackConfig(Strict):
    """Multi-pass training (Eqs. 9-13)."""

    connection: ConnectionConfig = Field(default_factory=ConnectionConfig)
    schedule: str | list[Phase] = Field(default="none", description="schedule of passes: the name of one, none, or a list of phases")
    start_step: int = Field(default=0, ge=0, le=MOST_STEPS, description="first step with feedback")
    loss_weight: float = Field(default=1.0, ge=0, le=1e6, description="weight of later passes in the loss (lambda in Eq. 12)")
    loss_weight_ramp: int = Field(
        default=0, ge=0, le=MOST_STEPS, description="number of steps with feedback over which lambda rises from 0"
    )
    jitter: float = Field(default=0.02, ge=0, le=100, description="size of the noise on fed-back states (sigma in Eq. 13)")
    prefix: Literal["uniform", "shared", "per-row", "answer", "off"] = Field(
        default="uniform",
        description="plain positions at the start of later passes, drawn for each pass; shared: drawn once; answer: prompts of chat data",
    )
    prefix_rounding: int | None = Field(
        default=None,
        gt=0,
        le=2**24,
        description="later passes are computed from a multiple of this position on, which changes no value and no prefix; default: 1, or "
        "when compiled an eighth of the row (64 in short rows), because every start is a shape to compile",
    )
    fusion_warmup: int = Field(default=0, ge=0, le=MOST_STEPS, description="number of first steps with feedback that train only the fusion")
    control: Control = Field(default="none", description="ablation: what the fusion gets instead of the fed-back state")
    reuse: bool = Field(default=True, description="compute plain prefixes once and reuse them (exact); false: compute every pass in full")
    adaptive: AdaptiveConfig | None = Field(default=None, description="adapts the share of deeper passes to measurements; null = off")

    @property
    def phases(self) -> list[Phase]:
        """The phases of the schedule. Raises ValueError for a name that is unknown and fractions that don't sum to 1."""
        phases = named(SCHEDULES, self.schedule, "schedule") if isinstance(self.schedule, str) else self.schedule
        if abs(sum(phase.fraction for phase in phases) - 1) > 1e-6:
            raise ValueError(f"feedback.schedule: fractions must sum to 1, got {sum(p.fraction for p in phases):g}")
        return phases

    @property
    def feeds_back(self) -> bool:
        """Whether any step takes more than one pass."""
        return any(k > 1 and share > 0 for phase in self.phases for k, share in phase.passes.items())

    @property
    def rounding(self) -> int:
        """The multiple that later passes start at."""
        return self.prefix_rounding or 1

    def compiled(self, length: int) -> FeedbackConfig:
        """The same for compiled blocks and rows of `length`: unless it is set, later passes start at few places, each a compilation."""
        if self.prefix_rounding is not None:
            return self
        return self.model_copy(update={"prefix_rounding": max(min(64, length // 2), length // 8)})

    @field_validator("prefix", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        return "off" if value is False else value  # yaml reads a bare `off` as false
