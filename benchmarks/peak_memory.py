"""Peak memory of a step, in bytes above what was there before it.

On the CPU the profiler lists every allocation and release of PyTorch's allocator, those inside kernels included; the peak is the
highest running sum. On CUDA it is the allocator's own high-water mark.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

METHOD = (
    "highest running sum of PyTorch's CPU allocations and releases during one step (torch.profiler, profile_memory), "
    "above the weights that were there before: activations, gradients and temporaries"
)


def peak_bytes(step: Callable[[], object], device: str = "cpu") -> int:
    """Peak of `step`, which must leave nothing behind (gradients set to None)."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    changes = sorted((event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]")
    live = peak = 0
    for _, change in changes:
        live += change
        peak = max(peak, live)
    return peak
