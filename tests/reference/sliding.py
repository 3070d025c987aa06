"""The slow twin of sliding: everything is run anew for every token, and a text that is too long starts again with its last half."""

from __future__ import annotations

from fullband.model import FullBandModel
from reference.decoding import ReferenceRows


def reference_sliding_greedy(
    model: FullBandModel, prompt: list[int], count: int, feedback_passes: int | str, feeds_back: bool
) -> list[int]:
    """The `count` most likely tokens, one after the other."""
    context = model.trunk.context
    text, made = list(prompt), []
    if len(prompt) > context:
        text = prompt[-(context // 2) :]
    rows = ReferenceRows(model, [text], feedback_passes)
    for _ in range(count):
        if len(text) > context:
            text = text[-(context // 2) :]
            rows = ReferenceRows(model, [text], feedback_passes)
        top = rows.tops()
        made.append(int(model.trunk.head(top).argmax()))
        text = [*text, made[-1]]
        if len(text) <= context:
            rows.append_tokens([made[-1]], top if feeds_back else None)
    return made
