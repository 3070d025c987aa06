"""Loss and accuracy by feedback passes (the axis of Fig. 4), with standard errors.

A document, not a token, is what was sampled: tokens of one document are alike, so errors are taken over documents. The loss is a
ratio of sums, Σ nll / Σ tokens; its standard error, and that of a paired difference, is the ratio estimator's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullband.amounts import without_infinities
from fullband.data.batch import IGNORE, Batch, Document, stack
from fullband.feedback.by_passes import check_feedback_passes, states_by_passes, top_states
from fullband.feedback.loss import CHUNK_LOGITS, token_losses
from fullband.feedback.passes import FeedbackModel
from fullband.feedback_config import FeedbackPasses


@dataclass(frozen=True)
class PassesLoss:
    """Loss in nats a token and perplexity after some feedback passes; `difference` is to the loss without feedback, paired by document.

    Standard errors are over documents; None where there is only one.
    """

    feedback_passes: FeedbackPasses
    loss: float
    loss_stderr: float | None
    perplexity: float
    perplexity_stderr: float | None
    difference: float
    difference_stderr: float | None


@dataclass(frozen=True)
class LossReport:
    """`documents` that have a token to predict, `tokens` predicted after each number of feedback passes, and a row for each number."""

    documents: int
    tokens: int
    rows: list[PassesLoss]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class PositionAccuracy:
    """Share of correct answers at each position [T] (the most likely token), its binomial standard error, and the answers counted.

    NaN where nothing was asked.
    """

    accuracy_T: Tensor
    stderr_T: Tensor
    counts_T: Tensor

    def to_json(self) -> dict[str, Any]:
        """As lists; null where nothing was asked."""
        found = {"accuracy": self.accuracy_T, "stderr": self.stderr_T, "counts": self.counts_T}
        return {name: without_infinities(values.tolist()) for name, values in found.items()}


@torch.no_grad()
def loss_by_passes(
    model: FeedbackModel,
    documents: Sequence[Sequence[int] | Document],
    feedback_passes: Sequence[FeedbackPasses] = (0, 1),
    batch_tokens: int = 8192,
) -> LossReport:
    """Loss of held-out documents after each of `feedback_passes`, one row for each in the order given.

    A document is a list of ids, whose next ones are predicted, or has targets of its own (a task's answers). One longer than the
    context is cut into pieces that each start afresh, and counts as one document; every token but a list's first is predicted once.
    `batch_tokens` is the size of a padded batch, and changes nothing but memory and rounding.

    Raises ValueError if no document has two tokens, for ids outside the vocabulary (document named) and for bad settings.
    """
    for passes in feedback_passes:
        check_feedback_passes(passes)
    if not feedback_passes or batch_tokens < 1:
        raise ValueError("loss by passes needs at least one number of feedback passes and one token in a batch")
    owners, pieces = _pieces(documents, model.trunk.context, model.trunk.vocab_size)
    if not pieces:
        raise ValueError("no document has two tokens: there is nothing to predict")
    all_passes: list[FeedbackPasses] = list(dict.fromkeys([0, *feedback_passes]))  # 0 is what the differences are taken to
    sums_PD = torch.zeros(len(all_passes), len(documents), dtype=torch.float64)
    counts_D = torch.zeros(len(documents), dtype=torch.float64)
    for places, batch in _batches(pieces, batch_tokens):
        owners_B = torch.tensor([owners[place] for place in places])
        counts_D.index_add_(0, owners_B, (batch.targets != IGNORE).sum(-1).double())
        batch = batch.to(model.trunk.device)
        for passes, states_BTD in states_by_passes(model, batch.tokens, all_passes, batch.layout):
            nll, _ = token_losses(states_BTD.flatten(0, 1), model.trunk.head_weight, batch.targets.flatten())
            sums_PD[all_passes.index(passes)].index_add_(0, owners_B, nll.view(batch.shape).sum(-1).double().cpu())
    scored = counts_D > 0
    sums_PD, counts_D = sums_PD[:, scored], counts_D[scored]
    rows = [_row(passes, sums_PD[all_passes.index(passes)], sums_PD[0], counts_D) for passes in feedback_passes]
    return LossReport(documents=int(scored.sum()), tokens=int(counts_D.sum()), rows=rows)


def batch_shapes(model: FeedbackModel, documents: Sequence[Sequence[int] | Document], batch_tokens: int = 8192) -> list[tuple[int, int]]:
    """(rows, positions) of each batch in which `loss_by_passes` evaluates these documents. Raises ValueError as it does."""
    _, pieces = _pieces(documents, model.trunk.context, model.trunk.vocab_size)
    return [(len(places), max(len(pieces[place]) for place in places)) for places, _ in _batches(pieces, batch_tokens)]


def ratio_and_stderr(sums_D: Tensor, counts_D: Tensor) -> tuple[float, float | None]:
    """R = Σ sums / Σ counts over D documents, and its standard error, √(D/(D-1) Σ (sum_d - R count_d)²) / Σ counts (Cochran 1977, §6.4).

    The error is None for a single document.
    """
    ratio = sums_D.sum() / counts_D.sum()
    documents = len(sums_D)
    if documents < 2:
        return float(ratio), None
    squares = (sums_D - ratio * counts_D).square().sum()
    return float(ratio), float((documents / (documents - 1) * squares).sqrt() / counts_D.sum())


@torch.no_grad()
def accuracy_by_position(
    model: FeedbackModel, tokens: Tensor, targets: Tensor, feedback_passes: FeedbackPasses = 0, batch_rows: int = 64
) -> PositionAccuracy:
    """How often the most likely token is the target, at each position, for sequences [N, T] of one document each.

    targets   the id wanted at each position [N, T]; -100 is not counted
    Raises ValueError as `feedback.by_passes.top_states` does, and if shapes differ.
    """
    if tokens.shape != targets.shape or tokens.dim() != 2:
        raise ValueError(f"tokens and targets must both be [N, T], got {list(tokens.shape)} and {list(targets.shape)}")
    if batch_rows < 1:
        raise ValueError(f"batch_rows must be at least 1, got {batch_rows}")
    right_T = torch.zeros(tokens.shape[1], dtype=torch.float64)
    counts_T = torch.zeros(tokens.shape[1], dtype=torch.long)
    for tokens_BT, targets_BT in zip(tokens.split(batch_rows), targets.split(batch_rows), strict=True):
        targets_BT = targets_BT.to(model.trunk.device)
        states_BTD = top_states(model, tokens_BT.to(model.trunk.device), feedback_passes)
        answers_BT = _most_likely(states_BTD.flatten(0, 1), model.trunk.head_weight).view(targets_BT.shape)
        scored_BT = targets_BT != IGNORE
        right_T += ((answers_BT == targets_BT) & scored_BT).sum(0).cpu()
        counts_T += scored_BT.sum(0).cpu()
    accuracy_T = right_T / counts_T
    return PositionAccuracy(accuracy_T, (accuracy_T * (1 - accuracy_T) / counts_T).sqrt(), counts_T)


def _most_likely(states_ND: Tensor, head_weight_VD: Tensor) -> Tensor:
    """[N] ids, holding few logits at once."""
    chunk = max(1, CHUNK_LOGITS // head_weight_VD.shape[0])
    return torch.cat([F.linear(part, head_weight_VD).argmax(-1) for part in states_ND.split(chunk)])


def _pieces(documents: Sequence[Sequence[int] | Document], context: int, vocab_size: int) -> tuple[list[int], list[Document]]:
    """(document number of each piece, pieces of at most `context` inputs, each with something to predict)."""
    owners, pieces = [], []
    for number, given in enumerate(documents):
        document = given if isinstance(given, Document) else _predicting_all(torch.as_tensor(given, dtype=torch.long))
        ids = torch.cat([document.tokens, document.targets[document.targets != IGNORE]])
        outside = ids[(ids < 0) | (ids >= vocab_size)]
        if len(outside):
            raise ValueError(f"document {number}: token id {int(outside[0])} is outside the vocabulary (0..{vocab_size - 1})")
        for start in range(0, len(document), context):
            here = slice(start, start + context)
            piece = Document(document.tokens[here], document.targets[here], None if document.plain is None else document.plain[here])
            if bool((piece.targets != IGNORE).any()):
                owners.append(number)
                pieces.append(piece)
    return owners, pieces


def _predicting_all(ids: Tensor) -> Document:
    """Each token but the first is predicted."""
    return Document(ids[:-1], ids[1:])


def _batches(pieces: list[Document], batch_tokens: int) -> Iterator[tuple[list[int], Batch]]:
    """(places in `pieces`, the batch), longest first, so that a batch has little padding and the first one shows the memory needed."""
    order = sorted(range(len(pieces)), key=lambda place: -len(pieces[place]))
    while order:
        size = max(1, batch_tokens // len(pieces[order[0]]))
        places, order = order[:size], order[size:]
        yield places, stack([pieces[place] for place in places])


def _row(passes: FeedbackPasses, sums_D: Tensor, plain_D: Tensor, counts_D: Tensor) -> PassesLoss:
    loss, stderr = ratio_and_stderr(sums_D, counts_D)
    difference, difference_stderr = ratio_and_stderr(sums_D - plain_D, counts_D)
    perplexity = math.exp(loss) if loss < 700 else math.inf  # exp overflows beyond 709
    return PassesLoss(
        feedback_passes=passes,
        loss=loss,
        loss_stderr=stderr,
        perplexity=perplexity,
        perplexity_stderr=None if stderr is None else perplexity * stderr,  # delta method
        difference=difference,
        difference_stderr=difference_stderr,
    )
