"""What the playground shows of states. Of a given text by feedback passes: the loss of each token, how its state still moves, and for a
model of a built-in task whether its answers are right. Of an answer: how much the carried state changes each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from fullband.config import TaskSource
from fullband.data.tasks import GroupWord, Task, build_task, permutations_of
from fullband.data.tokenizer import Tokenizer
from fullband.data.tokenizers import TaskTokenizer
from fullband.decode.modes import ModeName, resolve_mode, run_tokens
from fullband.decode.prefill import prefill_reported
from fullband.decode.prompts import align_prompts
from fullband.feedback.by_passes import iterate_passes, top_states
from fullband.feedback.passes import FeedbackModel, PassState, below, check_length
from fullband.feedback.state import DecodeState
from fullband.serve.replies import word_of
from fullband.serve.schemas import MOST_PASSES, FewPasses, Ids, Messages
from fullband.strict import Strict
from fullband.trunk.pointwise import lengths

MOST_TOKENS = 1024


class ViewRequest(Strict):
    """POST /fullband/passes."""

    text: str
    feedback_passes: int = Field(default=8, ge=0, le=MOST_PASSES)
    exact: bool = True


class CarriedRequest(Strict):
    """POST /fullband/carried. `messages` are a chat in place of a prompt; prompt and answer are texts or ids."""

    prompt: str | Ids = ""
    messages: Messages | None = None
    answer: str | Ids
    mode: ModeName = "soft"
    feedback_passes: FewPasses | None = None


@torch.no_grad()
def by_passes(model: FeedbackModel, tokenizer: Tokenizer, asked: ViewRequest) -> dict[str, Any]:
    """A row for 0, 1, … feedback passes and, if asked for, exact evaluation:

    loss     nats of each token given those before it; the first has none
    change   relative change of each state in this pass, None in the first pass and the exact row
    answers  of a built-in task: the most likely answer at each position, beside the right ones

    Raises ValueError for a text that is empty, longer than the context or than MOST_TOKENS.
    """
    tokens = tokenizer.begin(asked.text)
    if not tokens:
        raise ValueError("text: must have at least one token")
    if len(tokens) > MOST_TOKENS:
        raise ValueError(f"text: must have at most {MOST_TOKENS} tokens, got {len(tokens)}")
    check_length(model, len(tokens))
    tokens_1T = torch.tensor([tokens], device=model.trunk.device)
    is_task = isinstance(tokenizer, TaskTokenizer)
    rows, before = [], None
    for passes, states_1TD in enumerate(islice(iterate_passes(model, below(model, tokens_1T)[0]), asked.feedback_passes + 1)):
        change: list[float] | None = None if before is None else (lengths(states_1TD - before) / lengths(states_1TD))[0].tolist()
        rows.append({"feedback_passes": passes, "change": change} | _of_states(model, tokenizer, tokens_1T, states_1TD, is_task))
        before = states_1TD
    if asked.exact:
        exact = _of_states(model, tokenizer, tokens_1T, top_states(model, tokens_1T, "exact"), is_task)
        rows.append({"feedback_passes": "exact", "change": None} | exact)
    found: dict[str, Any] = {"tokens": [word_of(tokenizer, token) for token in tokens], "rows": rows}
    return found | ({"right": _right_answers(tokenizer, tokens_1T)} if isinstance(tokenizer, TaskTokenizer) else {})


def _of_states(model: FeedbackModel, tokenizer: Tokenizer, tokens_1T: Any, states_1TD: Any, is_task: bool) -> dict[str, Any]:
    logits_TV = model.trunk.head(states_1TD)[0].float()
    if is_task:
        return {"answers": [tokenizer.decode([answer]) for answer in logits_TV.argmax(-1).tolist()]}
    targets = tokens_1T[0, 1:, None]
    return {"loss": [None, *(-logits_TV[:-1].log_softmax(-1).gather(1, targets)[:, 0]).tolist()]}


def _right_answers(tokenizer: TaskTokenizer, tokens_1T: Tensor) -> list[str]:
    answers = _task(tokenizer)[0].answers(tokens_1T.cpu().numpy())[0]
    return [tokenizer.decode([int(answer)]) for answer in answers]


def _task(tokenizer: TaskTokenizer) -> tuple[Task, str]:
    """The task, and its group or modulus."""
    kind, _, which = tokenizer.name.removeprefix("task:").partition(" ")
    return build_task(TaskSource(group=which) if kind == "group-word" else TaskSource(task="modular", modulus=int(which))), which


def about_task(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """The task of a model of a built-in one: its name, its tokens, and what they do, where they are permutations (`permutations_of`)."""
    if not isinstance(tokenizer, TaskTokenizer):
        return None
    task, which = _task(tokenizer)
    permute = isinstance(task, GroupWord) and which[0] != "Z"
    return {"name": task.name, "tokens": tokenizer.names, "permutations": permutations_of(which) if permute else None}


@torch.no_grad()
def carried(
    model: FeedbackModel, tokenizer: Tokenizer, prompt: Sequence[int], answer: Sequence[int], asked: CarriedRequest
) -> dict[str, Any]:
    """How much the carried state changes each token of an answer, decoded in `asked.mode`. Log-probabilities of token t, in nats:

    with     p(x_t | h_{t-1}) as it was decoded: the input at t-1 was merged with the state before it, e_{t-1} ⊗ h_{t-2} (Eqs. 4 and 8)
    without  the same after the same history, that is from the keys and values that feedback made of all positions before t-1, but the
             input at t-1 is e_{t-1} alone, as on a plain position. So it is the effect of one carried state, not of all of them

    The first token's are equal where the prompt's last position carries no state: in Soft (section 4.2), and for a prompt of one token.
    `prompt_positions` are what the trunk computed for the prompt. Runs the prompt once, and two positions a token.

    Raises ValueError for Standard, which carries none, for prompts and answers that are empty, too long or hold ids that are none, and in
    Fused for models with recurrent layers.
    """
    mode = resolve_mode(asked.mode, asked.feedback_passes)
    if not mode.feeds_back:
        raise ValueError("mode: standard carries no state; use soft or fused")
    if not answer or len(answer) > MOST_TOKENS:
        raise ValueError(f"answer: must have 1 to {MOST_TOKENS} tokens, got {len(answer)}")
    check_length(model, len(prompt) + len(answer))
    tokens_S = align_prompts(model.trunk, [answer]).tokens_BT[0]
    aligned, passes = align_prompts(model.trunk, [prompt]), mode.feedback_passes
    state, report = prefill_reported(model, aligned, passes, keep="all")
    run = len(prompt) * (1 if passes == "exact" else 1 + int(passes)) if report is None else report.executed_positions
    fed = [state.top_BD]
    plain = [state.top_BD if passes == 0 or len(prompt) == 1 else _run_plain(model, _one_less(model, state), aligned.tokens_BT[0, -1])]
    for token in tokens_S[:-1]:
        plain.append(_run_plain(model, state, token))
        state = run_tokens(model, state, token.view(1, 1), feeds_back=True)[0]
        fed.append(state.top_BD)
    with_S, without_S = (_logprobs(model, torch.cat(tops), tokens_S) for tops in (fed, plain))
    words = [word_of(tokenizer, token) for token in answer]
    return {"tokens": words, "with": with_S, "without": without_S, "prompt_positions": run}


def _run_plain(model: FeedbackModel, state: DecodeState, token: Tensor) -> Tensor:
    """[1, D] of one more token that no state is merged with."""
    return run_tokens(model, state, token.view(1, 1), feeds_back=False)[1][:, 0]


def _one_less(model: FeedbackModel, state: DecodeState) -> DecodeState:
    """The state without its last position, for a token that nothing is fed into."""
    if not model.trunk.can_crop_cache:
        raise ValueError("mode: what the carried state changes can be shown in soft only, as this model has recurrent layers")
    length = int(state.positions_B) - 1
    lower = None if state.below is None else state.below.crop(length)
    return replace(state, fed=PassState(state.cache.crop(length)), below=lower, positions_B=state.positions_B - 1)


def _logprobs(model: FeedbackModel, states_SD: Tensor, tokens_S: Tensor) -> list[float]:
    found: list[float] = model.trunk.head(states_SD).float().log_softmax(-1).gather(1, tokens_S[:, None])[:, 0].tolist()
    return found
