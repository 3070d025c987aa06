"""Walk with a batch from the recipe to the backward pass, or with a prompt from the command to the text, and print where it goes:

    python docs/walk.py batch
    python docs/walk.py prompt

A line is a function that leads to one of the landmarks, `file:line  function`, in the order in which they are entered. What they call on
the side (checks, logging, files) is left out; nothing is listed that does not run.
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import fullband

SOURCE = Path(fullband.__file__).parent
RECIPE = {
    "name": "walk",
    "model": {"preset": "tiny"},
    "data": {"source": {"kind": "task"}, "length": 16},
    "feedback": {"schedule": "three-pass"},
    "train": {"steps": 1, "batch_rows": 2, "device": "cpu"},
    "evaluation": {"rows": 0},
}
LANDMARKS = {
    "batch": ["resolve", "next_batch", "fused_pass", "merge", "Block.forward", "weighted_loss", "backward", "Optimizer.step"],
    "prompt": ["begin", "prefill_reported", "Block.forward", "Sampler.__call__", "fused_pass", "RowText.take", "completions"],
}


def walk(run: Callable[[], Any], landmarks: list[str]) -> list[tuple[str, str]]:
    """(file:line, function) of what leads to the first call of each landmark."""
    stack: list[CodeType | None] = []
    seen: dict[CodeType, None] = {}
    left = set(landmarks)

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            code = frame.f_code
            ours = code.co_filename.startswith(str(SOURCE)) and not code.co_name.startswith("<")
            stack.append(code if ours else None)
            found = {name for name in left if ours and (code.co_name == name or code.co_qualname == name)}
            if found:
                left.difference_update(found)
                seen.update(dict.fromkeys(part for part in stack if part is not None))
        elif event == "return" and stack:
            stack.pop()

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    assert not left, f"never reached: {', '.join(sorted(left))}"
    return [(f"{Path(code.co_filename).relative_to(SOURCE).as_posix()}:{code.co_firstlineno}", code.co_qualname) for code in seen]


def train(folder: Path) -> Any:
    from fullband.config import Recipe, parse
    from fullband.training import train

    return train(parse(Recipe, RECIPE | {"output": str(folder)}, "walk"))


def walk_of(kind: str) -> list[tuple[str, str]]:
    """Of a "batch" in training, or of a "prompt" of `fullband generate` in Fused."""
    with tempfile.TemporaryDirectory() as place, redirect_stdout(io.StringIO()):
        folder = Path(place) / "run"
        if kind == "batch":
            return walk(lambda: train(folder), LANDMARKS[kind])
        train(folder)
        from fullband.cli.main import app

        command = ["generate", str(folder), "0 1 2", "--mode", "fused", "--max-new-tokens", "3", "--no-stream"]
        return walk(lambda: app(command, standalone_mode=False), LANDMARKS[kind])


if __name__ == "__main__":
    if sys.argv[1:] not in (["batch"], ["prompt"]):
        sys.exit(__doc__)
    for place, function in walk_of(sys.argv[1]):
        print(f"{place:40} {function}")
