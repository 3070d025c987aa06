"""What the playground shows of a given text: by feedback passes, the loss of each token and how its state still moves; for a model of a
built-in task, whether its answers are right."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from pydantic import Field

from fullband.config import TaskSource
from fullband.data.tasks import build_task
from fullband.data.tokenizer import Tokenizer
from fullband.data.tokenizers import TaskTokenizer
from fullband.feedback.by_passes import iterate_passes, top_states
from fullband.feedback.passes import FeedbackModel, below, check_length
from fullband.serve.replies import word_of
from fullband.strict import Strict
from fullband.trunk.pointwise import lengths

MOST_PASSES, MOST_TOKENS = 64, 1024


class ViewRequest(Strict):
    """POST /fullband/passes."""

    text: str
    feedback_passes: int = Field(default=8, ge=0, le=MOST_PASSES)
    exact: bool = True


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


def _right_answers(tokenizer: TaskTokenizer, tokens_1T: Any) -> list[str]:
    kind, _, which = tokenizer.name.removeprefix("task:").partition(" ")
    source = TaskSource(group=which) if kind == "group-word" else TaskSource(task="modular", modulus=int(which))
    answers = build_task(source).answers(tokens_1T.cpu().numpy())[0]
    return [tokenizer.decode([int(answer)]) for answer in answers]
