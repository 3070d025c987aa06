"""Ratios, measured side by side in one run: `python -m benchmarks.multipass`, `.train`, `.head`, `.attention` (each with --help)."""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler otherwise writes to the terminal; read when torch is imported
