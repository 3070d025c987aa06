"""One rank of a run: writes the bytes that its last step gave to each kind of collective. RECIPE FOLDER OVERRIDES; see test_planning."""

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

from fullband.config import load_recipe
from fullband.training import loop

sent: Counter[str] = Counter()
steps: list[dict[str, int]] = []


def counted(owner: Any, name: str, kind: str, whole: int) -> None:
    """Count the bytes of argument `whole`, by position or, if it is named, its name in FSDP's own calls."""
    real = getattr(owner, name)

    def call(*given: Any, **named: Any) -> Any:
        names = ("output_tensor", "input_tensor")
        offset = 1 if isinstance(owner, type) else 0
        tensor = named[names[whole]] if names[whole] in named else given[whole + offset]
        sent[kind] += tensor.numel() * tensor.element_size()
        return real(*given, **named)

    setattr(owner, name, call)


counted(collectives.DefaultAllGather, "__call__", "all_gather", 0)
counted(collectives.DefaultReduceScatter, "__call__", "reduce_scatter", 1)
counted(dist, "all_to_all_single", "all_to_all", 1)
original = loop.step_values


def step_values(*given: Any) -> Any:
    steps.append(dict(sent))
    return original(*given)


loop.step_values = step_values
loop.train(load_recipe(sys.argv[1], sys.argv[3:]))
last = {kind: steps[-1][kind] - steps[-2][kind] for kind in sent}
(Path(sys.argv[2]) / f"{os.environ['RANK']}.json").write_text(json.dumps(last))
