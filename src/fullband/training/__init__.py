"""Training: one loop (`loop.py`), the step it repeats, checkpoints that survive a kill, metrics."""

from fullband.training.loop import RunResult, train

__all__ = ["RunResult", "train"]
