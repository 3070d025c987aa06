"""Rows to diagnose: one document each, all of one length, so that a position is as far along in every row."""

from __future__ import annotations

from collections.abc import Sequence

from fullband.config import TaskSource
from fullband.data.batch import Batch, Document, stack
from fullband.data.tasks import build_task

LEAST_LENGTH = 256  # of rows whose length is not given: enough for greedy text to look like itself
BEYOND_TRAINING = 4  # task rows are this many times as long as the training rows: longer ones nothing can follow


def rows_of_documents(documents: Sequence[Document], rows: int, passes: int, context: int, length: int | None = None) -> Batch:
    """`rows` rows cut from documents, the first pieces of different documents before second pieces.

    length   tokens of a row; None = twice the passes (so that the wavefront leaves half a row free) and at least 256, or as many
             as the context and the documents allow
    Raises ValueError if there is no document of the length asked for.
    """
    if length is not None and length > context:
        raise ValueError(f"rows of {length} tokens do not fit the model's context of {context}")
    longest = max((len(document) for document in documents), default=0)
    wanted = min(context, max(2 * passes, LEAST_LENGTH)) if length is None else length
    if length is not None and longest < length:
        raise ValueError(f"no document has {length} tokens, the longest has {longest}; ask for shorter rows")
    if longest < 2:
        raise ValueError("no document has two tokens: there is nothing to evaluate")
    by_size = sorted((len(document) for document in documents), reverse=True)
    wanted = min(wanted, max(by_size[min(rows, len(by_size)) - 1], longest // 2)) if length is None else wanted
    starts = range(0, longest - wanted + 1, wanted)
    pieces = [
        Document(document.tokens[start : start + wanted], document.targets[start : start + wanted])
        for start in starts
        for document in documents
        if len(document) >= start + wanted
    ]
    return stack(pieces[:rows])


def rows_of_task(
    source: TaskSource, seed: int, rows: int, passes: int, context: int, length: int | None = None, trained: int | None = None
) -> Batch:
    """`rows` held-out examples of a built-in task.

    length    positions of a row; None = twice the passes and at least 256, but at most the context and four times the `trained` length
    Raises ValueError if they do not fit the context.
    """
    if length is None:
        limit = context if trained is None else min(context, BEYOND_TRAINING * trained)
        length = min(limit, max(2 * passes, LEAST_LENGTH))
    if length > context:
        raise ValueError(f"rows of {length} tokens do not fit the model's context of {context}")
    return build_task(source).examples(seed, "validation", 0, rows, length)


def prompts_of(batch: Batch, tokens: int, rows: int) -> list[list[int]]:
    """The first `tokens` tokens of the first `rows` rows: prompts for rollouts."""
    first: list[list[int]] = batch.tokens[:rows, : min(tokens, batch.shape[1])].tolist()
    return first
