"""Many programs, several at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from fullband.evaluate.sandbox.sandbox import Program, Sandbox, SandboxResult


def run_all(
    programs: Sequence[Program], sandbox: Sandbox, *, workers: int, progress: Callable[[int, SandboxResult], None] | None = None
) -> list[SandboxResult]:
    """Results in the order of `programs`. `progress` gets each program's index and result as it ends, always in the calling thread.

    Time limits are by the clock: more workers than cores make slow programs time out. Raises ValueError for less than one worker, and
    whatever `progress` raises, once the programs already running have ended.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    results: dict[int, SandboxResult] = {}
    with ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(sandbox.run, program): index for index, program in enumerate(programs)}
        try:
            for future in as_completed(futures):
                index = futures[future]
                results[index] = future.result()
                if progress is not None:
                    progress(index, results[index])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [results[index] for index in range(len(programs))]
