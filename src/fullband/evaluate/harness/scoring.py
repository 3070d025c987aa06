"""Log-likelihoods of continuations, evaluated in several ways at once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fullband.evaluate.harness.sharing import Example, alone, batches_of, examples_of, group_examples
from fullband.evaluate.harness.states import Scoring, shareable, states_after_shared, states_of_whole
from fullband.feedback.by_passes import check_feedback_passes
from fullband.feedback.passes import FeedbackModel


@dataclass(frozen=True)
class Continuation:
    """Ids of a context, at least one, and of what follows it."""

    context: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def key(self) -> str:
        return hashlib.sha256(f"{self.context}{self.tokens}".encode()).hexdigest()[:24]


@dataclass(frozen=True)
class Score:
    """Σ log p of a continuation's tokens, in nats, and whether each of them is the most likely."""

    log_likelihood: float
    greedy: bool


@torch.no_grad()
def score_continuations(
    model: FeedbackModel,
    requests: Sequence[Continuation],
    scorings: Sequence[Scoring],
    batch_rows: int = 8,
    max_length: int | None = None,
    done: Callable[[list[int], list[dict[Scoring, Score]]], None] = lambda places, scores: None,
) -> list[dict[Scoring, Score]]:
    """A score for each request and each of `scorings`.

    batch_rows  examples of a batch, padded. A beginning that several of them share is run once, which changes nothing but rounding
    max_length  inputs that are run; of longer ones the last ones are. None = the model's context
    done        gets the places and scores of each batch as soon as they are known

    Raises ValueError for a scoring that does not exist, and for a continuation that is empty or longer than `max_length`.
    """
    for scoring in scorings:
        if scoring != "soft":
            check_feedback_passes(scoring)
    limit = max_length or model.trunk.context
    for request in requests:
        if not request.context or not 0 < len(request.tokens) <= limit:
            raise ValueError(f"a continuation has 1 to {limit} tokens and a context before it, not {len(request.tokens)}")
    scores: list[dict[Scoring, Score]] = [{} for _ in requests]

    def score(examples: Sequence[tuple[Example, int]], found: Iterable[tuple[Scoring, Tensor]]) -> None:
        """`found`: states of each example from its input number `first` on."""
        for scoring, states_BTD in found:
            for (example, first), states_TD in zip(examples, states_BTD, strict=True):
                for place in example.places:
                    tokens = requests[place].tokens
                    end = len(example.inputs) - first
                    scores[place][scoring] = _score(states_TD[end - len(tokens) : end], model.trunk.head_weight, tokens)

    if not requests:
        return scores
    shared, unshared = shareable(model, scorings)
    examples = examples_of([_inputs(request, limit) for request in requests])
    # Soft runs a context without feedback, once, and only the continuation position by position: that pays for a single example, too.
    groups = group_examples(examples, batch_rows, whatever_saved="soft" in shared) if shared else alone(examples)
    for batch in batches_of(groups, batch_rows):
        together = [(example, group.shared) for group in batch for example in group.examples]
        begin_alike = batch[0].shared > 0
        if begin_alike:
            score(together, states_after_shared(model, batch, shared))
        if whole := unshared if begin_alike else scorings:
            score([(example, 0) for example, _ in together], states_of_whole(model, [example for example, _ in together], whole))
        places = [place for example, _ in together for place in example.places]
        done(places, [scores[place] for place in places])
    return scores


def _inputs(request: Continuation, limit: int) -> tuple[tuple[int, ...], int]:
    """(what is run, at most `limit` ids, where the continuation begins in it)."""
    inputs = (request.context + request.tokens)[-(limit + 1) :][:-1]
    return inputs, len(inputs) - len(request.tokens) + 1


def _score(states_ND: Tensor, head_weight_VD: Tensor, tokens: tuple[int, ...]) -> Score:
    logits_NV = F.linear(states_ND, head_weight_VD)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    targets_N = torch.tensor(tokens, device=logits_NV.device)
    log_likelihood = F.log_softmax(logits_NV, dim=-1).gather(1, targets_N[:, None]).double().sum()  # float32 steps by 1e-4 from 1,024 on
    return Score(float(log_likelihood), bool((logits_NV.argmax(dim=-1) == targets_N).all()))
