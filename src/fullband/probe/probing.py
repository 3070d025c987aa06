"""The whole experiment: settings × ways of prefilling × depths, each with its controls and its causal check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fullband.data.tokenizer import Tokenizer
from fullband.feedback.passes import FeedbackModel, check_length
from fullband.probe.classifier import fit, folds, shuffled
from fullband.probe.examples import TASKS, ProbeSetting, Task, build_settings
from fullband.probe.inputs import ProbeInputs, encode_setting
from fullband.probe.prefills import (
    FULL,
    PREFILLS,
    STANDARD,
    Answers,
    before_colon,
    colon_residuals,
    embedding_only,
    margins,
    patched_margins,
)
from fullband.probe.result import DepthResult, PrefillResult, ProbeResult, SettingResult


@dataclass(frozen=True)
class ProbePlan:
    """Settings with their tokens, ready to run."""

    settings: list[tuple[ProbeSetting, ProbeInputs]]
    prefills: list[str]
    seed: int
    depths: list[int]

    @property
    def positions(self) -> int:
        """Positions the trunk will compute, to a few at the end of each example."""
        readings = (FULL in self.prefills) + any(name != FULL for name in self.prefills)
        return readings * sum(len(tokens) for _, inputs in self.settings for tokens in inputs.tokens)


def plan_probe(
    model: FeedbackModel,
    tokenizer: Tokenizer,
    tasks: Sequence[Task] = TASKS,
    prefills: Sequence[str] = PREFILLS,
    seed: int = 0,
    groups: int | None = None,
    depths: Sequence[int] | None = None,
) -> ProbePlan:
    """Make and encode the examples.

    prefills   any of "standard", "1", "2", "4" (recurrent suffixes) and "full"
    groups     the first groups of each setting (None = all of App. F's)
    depths     those of the residual stream to probe: 0 = the stack's input, k = the output of layer k (None = all)

    Raises ValueError for unknown names or depths, fewer groups than folds, inputs longer than the model's context, and without
    scikit-learn.
    """
    known = range(len(model.trunk.layers) + 1)
    wanted = list(known) if depths is None else sorted(set(depths))
    if not wanted or not set(wanted) <= set(known):
        raise ValueError(f"depths are of 0 (the input) to {known[-1]}, not {', '.join(map(str, wanted)) or 'none'}")
    unknown = [name for name in prefills if name not in PREFILLS]
    if unknown or not prefills:
        raise ValueError(f"unknown prefill '{''.join(unknown[:1])}' (known: {', '.join(PREFILLS)})")
    settings = []
    for setting in build_settings(tasks, seed, groups):
        folds(_groups(setting), seed)
        inputs = encode_setting(setting, tokenizer)
        longest = max(inputs.lengths.values())
        try:
            check_length(model, longest)
        except ValueError as error:
            raise ValueError(f"{setting.name}: {error}; leave this task out") from None
        settings.append((setting, inputs))
    return ProbePlan(settings, [name for name in PREFILLS if name in prefills], seed, wanted)


@torch.no_grad()
def run_probe(
    model: FeedbackModel, plan: ProbePlan, batch_tokens: int = 32768, done: Callable[[ProbeResult], None] | None = None
) -> ProbeResult:
    """Read and probe every setting. `done` is given what is finished after each of them."""
    depths = len(plan.depths)
    finished: list[SettingResult] = []
    for setting, inputs in plan.settings:
        finished.append(_probe_setting(model, setting, inputs, plan, batch_tokens))
        if done is not None:
            done(ProbeResult(plan.seed, depths, plan.prefills, list(finished)))
    return ProbeResult(plan.seed, depths, plan.prefills, finished)


@dataclass
class _Read:
    """What running a setting in one mode leaves, a piece for each batch of N rows: the residual stream at the E depths [E, N, D], the
    input with nothing processed [N, D], margins [N], and patched ones [E, N]."""

    residuals: list[Tensor] = field(default_factory=list)
    unprocessed: list[Tensor] = field(default_factory=list)
    margins: list[Tensor] = field(default_factory=list)
    patched: list[Tensor] = field(default_factory=list)


def _probe_setting(model: FeedbackModel, setting: ProbeSetting, inputs: ProbeInputs, plan: ProbePlan, batch_tokens: int) -> SettingResult:
    read = _read_setting(model, inputs, plan, batch_tokens)
    return SettingResult(
        setting.name,
        setting.task,
        setting.registers,
        setting.writes_each,
        setting.groups,
        len(setting.examples),
        inputs.lengths,
        inputs.notes,
        [_probe_prefill(name, found, setting, inputs, plan) for name, found in read.items()],
    )


def _read_setting(model: FeedbackModel, inputs: ProbeInputs, plan: ProbePlan, batch_tokens: int) -> dict[str, _Read]:
    device = model.trunk.device
    answers = Answers(inputs.shared, inputs.telling)
    read = {name: _Read() for name in plan.prefills}
    for rows in inputs.batches(batch_tokens):
        tokens_BT = torch.tensor(inputs.tokens[rows], device=device)
        for name, colon in before_colon(model, tokens_BT, plan.prefills, inputs.steps):
            residual_EBD, known = colon_residuals(model, colon)
            residual_EBD = residual_EBD[plan.depths]
            streams = zip(plan.depths, residual_EBD, strict=True)
            patched = [patched_margins(model, colon, residual_BD, depth, answers) for depth, residual_BD in streams]
            found = read[name]
            found.residuals.append(residual_EBD.float().cpu())
            found.unprocessed.append(embedding_only(model, colon, tokens_BT[:, -2]).float().cpu())
            found.margins.append(margins(model, known, answers, colon.recurrent).cpu())
            found.patched.append(torch.stack(patched).cpu())
    return read


def _probe_prefill(name: str, read: _Read, setting: ProbeSetting, inputs: ProbeInputs, plan: ProbePlan) -> PrefillResult:
    seed = plan.seed
    residual_END = torch.cat(read.residuals, dim=1).numpy()
    margin_N, patched_EN = torch.cat(read.margins).numpy(), torch.cat(read.patched, dim=1).numpy()
    labels_N, groups_N = np.array([example.label for example in setting.examples]), _groups(setting)
    updates_N = np.array([example.updates for example in setting.examples])
    mixed_N = shuffled(labels_N, groups_N, seed)
    partner_N = margin_N[np.arange(len(margin_N)) ^ 1]
    differ_N = (margin_N > 0) != (partner_N > 0)
    depths = []
    for depth, states_ND, patched_N in zip(plan.depths, residual_END, patched_EN, strict=True):
        probed = fit(states_ND, labels_N, groups_N, seed)
        moved, effect = moved_answers(margin_N, patched_N)
        by_updates = {int(delay): float(probed.right_N[updates_N == delay].mean()) for delay in np.unique(updates_N)}
        control = fit(states_ND, mixed_N, groups_N, seed).accuracy
        depths.append(DepthResult(depth, probed.accuracy, probed.stderr, probed.interval, by_updates, control, moved, effect))
    return PrefillResult(
        prefill=name,
        steps=None if name in (STANDARD, FULL) else inputs.steps[int(name)],
        answered=float(((margin_N > 0) == labels_N).mean()),
        pairs=float(differ_N.mean()),
        embedding_only=fit(torch.cat(read.unprocessed).numpy(), labels_N, groups_N, seed).accuracy,
        depths=depths,
    )


def moved_answers(margin_N: np.ndarray, patched_N: np.ndarray) -> tuple[float | None, float | None]:
    """(share of answers that became the partner's, part of the way that margins went towards the partner's), over the pairs of partners
    that the model answers differently; rows 2i and 2i + 1 are partners. The second is a ratio of sums, Σ (patched - own)(partner's - own)
    / Σ (partner's - own)². None where there is no such pair."""
    partner_N = margin_N[np.arange(len(margin_N)) ^ 1]
    differ_N = (margin_N > 0) != (partner_N > 0)
    if not differ_N.any():
        return None, None
    own, wanted, patched = margin_N[differ_N], partner_N[differ_N], patched_N[differ_N]
    moved = float(((patched > 0) == (wanted > 0)).mean())
    return moved, float(((patched - own) * (wanted - own)).sum() / np.square(wanted - own).sum())


def _groups(setting: ProbeSetting) -> np.ndarray:
    return np.array([example.group for example in setting.examples])
