"""Log-probabilities of answers that were sampled already: what a trainer needs of its policy, under the mode that sampled them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat

import torch
from torch import Tensor

from fullband.decode.modes import Mode, resolve_mode
from fullband.decode.prefill import Prefilled, prefill_converged, run_chunks
from fullband.decode.prompts import PADDING, TokenLists, align_prompts
from fullband.feedback.by_passes import check_feedback_passes
from fullband.feedback.passes import FeedbackModel, Pass, below, check_length, parallel, plain_pass, sequential
from fullband.feedback.state import DecodeState
from fullband.feedback_config import FeedbackPasses

HEAD_POSITIONS = 1024  # whose logits are held at once


@dataclass(frozen=True)
class SampledAnswer:
    """Ids of a prompt and of an answer to it (the stop id among them), with the log-probabilities under which its tokens were sampled."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


def answer_logprobs(
    model: FeedbackModel,
    prompts: TokenLists,
    answers: TokenLists,
    mode: str = "soft",
    feedback_passes: FeedbackPasses | None = None,
    answer_passes: Sequence[FeedbackPasses] = ("exact",),
    temperature: float = 1.0,
    batch_rows: int = 16,
) -> dict[FeedbackPasses, list[Tensor]]:
    """Log-probabilities, in nats, of the tokens of every answer [tokens], for each of `answer_passes`. With gradients, unless they are off.

    mode, feedback_passes  in which the answers were sampled (`resolve_mode`): how the prompt is run, and whether answers feed back
    answer_passes   "exact" = position by position, each fed with the state before it, as it was sampled (Eq. 8). A number k = in 1 + k
                    parallel passes over the answer, whose first k + 1 tokens are exact (law 2); k = 0 is the answer without feedback.
                    In Standard all are the same
    temperature     that divides the logits. What filters left out (top-k, top-p, min-p) is not
    batch_rows      answers that are run together, padded, in the order given

    Raises ValueError for bad prompts, an empty answer, one that does not fit the context, "converged" among `answer_passes`, a temperature
    that is not above 0, and for a trunk that gives no cache (transformers' gradient checkpointing).
    """
    resolved = resolve_mode(mode, feedback_passes)
    for passes in answer_passes:
        check_feedback_passes(passes)
    if "converged" in answer_passes:
        raise ValueError("answers are run in 0, 1, 2, … feedback passes or 'exact', not 'converged'")
    if not temperature > 0:
        raise ValueError(f"the temperature must be above 0, got {temperature}")
    if len(prompts) != len(answers):
        raise ValueError(f"every answer needs its prompt, got {len(answers)} answers and {len(prompts)} prompts")
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if not len(answer):
            raise ValueError(f"answer {number} is empty")
        check_length(model, len(prompt) + len(answer))
    found: dict[FeedbackPasses, list[Tensor]] = {passes: [] for passes in answer_passes}
    for start in range(0, len(prompts), batch_rows):
        here = slice(start, start + batch_rows)
        aligned = align_prompts(model.trunk, answers[here]).padded_right()  # checks the ids
        lengths, tokens_BS = aligned.lengths_B.tolist(), aligned.tokens_BT
        scored_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device) < aligned.lengths_B[:, None]
        state = _after_prompts(model, prompts[here], resolved)
        for passes, top_BSD in _answer_states(model, state, tokens_BS[:, :-1], scored_BS[:, :-1], resolved, answer_passes):
            whole_BSD = torch.cat([state.top_BD[:, None], top_BSD], dim=1)  # each token's logits are of the state before it
            found[passes] += _logprobs(model, whole_BSD[scored_BS], tokens_BS[scored_BS], temperature).split(lengths)
    return found


def _after_prompts(model: FeedbackModel, prompts: TokenLists, mode: Mode) -> DecodeState:
    """As `prefill`, with gradients, except of prompts that are refined until they converge."""
    aligned = align_prompts(model.trunk, prompts)
    if mode.feedback_passes == "converged":
        return prefill_converged(model, aligned)[0]
    ((done, outputs),) = run_chunks(model, aligned, Prefilled.empty(mode.feedback_passes))
    return done.state(aligned, outputs[-1].top_BTD[:, -1])


def _answer_states(
    model: FeedbackModel, state: DecodeState, tokens_BS: Tensor, real_BS: Tensor, mode: Mode, answer_passes: Sequence[FeedbackPasses]
) -> Iterator[tuple[FeedbackPasses, Tensor]]:
    """(answer passes, top states [B, S, D]) of tokens after `state`; arbitrary where they are padding."""
    if not tokens_BS.shape[1]:
        yield from ((passes, state.top_BD[:, None][:, :0]) for passes in answer_passes)
        return
    layout = state.layout(tokens_BS.shape[1])
    if layout.positions_BT is not None and layout.documents_BT is not None:  # padding may lie beyond the context: it is no position of it
        positions_BS, documents_BS = layout.positions_BT.where(real_BS, 0), layout.documents_BT.where(real_BS, PADDING)
        layout = replace(layout, positions_BT=positions_BS, documents_BT=documents_BS)
    inputs, _ = below(model, tokens_BS, layout, state.below)
    plain = plain_pass(model, inputs, state.cache)
    if not mode.feeds_back:
        yield from ((passes, plain.top_BTD) for passes in answer_passes)
        return
    counts = {passes for passes in answer_passes if isinstance(passes, int)}
    more = parallel(model, inputs, plain, repeat(Pass(0, state.fed.before_BWD, state.cache), max(counts, default=0)))
    for passes, output in enumerate(chain([plain], more)):
        if passes in counts:
            yield passes, output.top_BTD
    if "exact" in answer_passes:
        yield "exact", sequential(model, inputs, state.fed)[1].top_BTD


def _logprobs(model: FeedbackModel, states_ND: Tensor, tokens_N: Tensor, temperature: float) -> Tensor:
    """[N], of each token given the state before it."""
    found = []
    for part_ND, here_N in zip(states_ND.split(HEAD_POSITIONS), tokens_N.split(HEAD_POSITIONS), strict=True):
        logits_NV = model.trunk.head(part_ND)
        logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / temperature
        found.append(logits_NV.log_softmax(dim=-1).gather(1, here_N[:, None])[:, 0])
    return torch.cat(found)
