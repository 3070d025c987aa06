"""Windowed attention on the CPU: tiles of queries against the whole mask and against plain causal attention.

Forward and backward of one layer. The tiled plan (trunk/attention.py) reads, for every tile of queries, only the keys inside the
window; small tiles waste fewer masked keys, large ones have less overhead. `causal` is SDPA without any window, the kernel's fast path.
The fastest tile over the windows is what TILE in trunk/attention.py should be.

    python -m benchmarks.attention --length 2048 --window 128 512 2048
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.report import options, prepare, show
from benchmarks.side_by_side import interleave
from fullband.trunk.attention import TILE, attend, dense_plan, tiled_plan


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = options(__doc__ or "", rounds=3)
    parser.add_argument("--length", type=int, default=2048, help="positions (default %(default)s)")
    parser.add_argument("--window", type=int, nargs="+", default=[128, 256, 512, 1024, 2048], help="keys a query sees")
    parser.add_argument("--tile", type=int, nargs="+", default=[64, 128, 256, 512], help="queries in a tile")
    parser.add_argument("--heads", type=int, default=3, help="(default %(default)s)")
    parser.add_argument("--kv-heads", type=int, default=1, help="(default %(default)s)")
    parser.add_argument("--head-dim", type=int, default=96, help="(default %(default)s)")
    chosen = parser.parse_args(arguments)
    about = prepare(chosen)

    query = torch.randn(1, chosen.heads, chosen.length, chosen.head_dim, requires_grad=True)
    key, value = (torch.randn(1, chosen.kv_heads, chosen.length, chosen.head_dim, requires_grad=True) for _ in range(2))
    run = partial(forward_backward, query, key, value)
    device = query.device
    names = [f"tile {tile}" for tile in chosen.tile]
    windows: dict[str, Any] = {}
    for window in chosen.window:
        plans = {f"tile {tile}": tiled_plan(chosen.length, chosen.length, window, None, device, query.dtype, tile) for tile in chosen.tile}
        plans["dense"] = dense_plan(chosen.length, chosen.length, window, None, device)
        candidates = {name: partial(run, partial(attend, plan=plan)) for name, plan in plans.items()} | {"causal": partial(run, causal)}
        timings = interleave(candidates, chosen.rounds, chosen.clock, f"window {window}")
        windows[str(window)] = {
            "dense_seconds": timings.best("dense"),
            "ratio_to_dense": {name: timings.ratio(name, "dense") for name in candidates if name != "dense"},
            "spread": {name: timings.spread(name, "dense") for name in candidates if name != "dense"},
            "fastest_tile": min(chosen.tile, key=lambda tile: timings.best(f"tile {tile}")),
        }
    rows = [
        [window, f"{r['dense_seconds'] * 1e3:.1f} ms", *(f"{r['ratio_to_dense'][name]:.2f}x" for name in [*names, "causal"])]
        for window, r in windows.items()
    ]
    result = about | {"tile_in_use": TILE, "windows": windows}
    title = f"Attention at length {chosen.length}, forward + backward, of the dense mask's time (TILE is {TILE})"
    show(title, ("window", "dense", *names, "causal"), rows, result, chosen.json)
    return result


def forward_backward(query: Tensor, key: Tensor, value: Tensor, attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    attention(query, key, value).sum().backward()
    query.grad = key.grad = value.grad = None


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1])


if __name__ == "__main__":
    main()
