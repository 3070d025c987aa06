"""The slow twin of sampling: one row, plain Python numbers, one rule after the other as its definition says."""

from __future__ import annotations

import math
from collections.abc import Collection


def reference_distribution(
    logits: list[float],
    seen: Collection[int] = (),
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
) -> list[float]:
    """The probability of every token. Each filter sees the probabilities that the one before it left."""
    scores = []
    for token, logit in enumerate(logits):
        if token in seen:
            logit = logit / repetition_penalty if logit > 0 else logit * repetition_penalty
        scores.append(logit / temperature)
    highest = max(scores)
    odds = {token: math.exp(score - highest) for token, score in enumerate(scores)}
    ranked = sorted(odds, key=lambda token: -odds[token])
    if top_k is not None:
        ranked = ranked[:top_k]
    if top_p < 1:
        total, together, nucleus = sum(odds[token] for token in ranked), 0.0, []
        for token in ranked:
            if together / total < top_p:
                nucleus.append(token)
            together += odds[token]
        ranked = nucleus
    ranked = [token for token in ranked if odds[token] >= min_p * odds[ranked[0]]]
    left = set(ranked)
    total = sum(odds[token] for token in left)
    return [odds[token] / total if token in left else 0.0 for token in range(len(logits))]
