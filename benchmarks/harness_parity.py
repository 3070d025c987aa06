"""Standard mode against lm-eval's own Hugging Face model: every log-likelihood and every greedy answer, on the first documents of a task.

    python -m benchmarks.harness_parity SOURCE CONVERTED --data-dir DATA --documents 2 --output results/evaluate-smoke/parity.json

SOURCE is a Hugging Face checkpoint, CONVERTED what `fullband convert` made of it. Tasks run one after the other, and each is written when
it is done.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from fullband.files import write_json

TASKS = ("copa", "openbookqa", "winogrande", "piqa", "arc_easy", "arc_challenge", "truthfulqa_mc2", "rte", "boolq", "mmlu", "gsm8k")


def compare(ours: Any, theirs: Any, benchmark: Any, documents: int) -> dict[str, Any]:
    """Largest difference of a log-likelihood, and how many texts or greedy flags differ, over all requests of the first documents."""
    from fullband.evaluate.harness.choice import requests_of

    found: dict[str, Any] = {"task": benchmark.name, "documents": 0, "requests": 0, "largest_difference": 0.0, "greedy_differ": 0}
    started = time.perf_counter()
    for instances in requests_of(benchmark, documents).values():
        kind = instances[0].request_type
        found["documents"] += len({instance.doc_id for instance in instances})
        found["requests"] += len(instances)
        for one, other in zip(*(getattr(model, kind)(instances, disable_tqdm=True) for model in (ours, theirs)), strict=True):
            if kind == "generate_until":
                found["greedy_differ"] += one != other
            else:
                found["largest_difference"] = max(found["largest_difference"], abs(one[0] - other[0]))
                found["greedy_differ"] += one[1] != other[1]
    return found | {"seconds": round(time.perf_counter() - started, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("converted")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--documents", type=int, default=2)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()

    from lm_eval.models.huggingface import HFLM

    from fullband.evaluate.harness.model import FullBandLM
    from fullband.evaluate.harness.tasks import load_benchmarks

    theirs = HFLM(pretrained=arguments.source, dtype="float32", batch_size=1, device="cpu")
    ours = FullBandLM(arguments.converted, dtype="float32", batch_size=1, device="cpu")
    rows: list[dict[str, Any]] = []
    for name in arguments.tasks.split(","):
        [benchmark] = load_benchmarks([name], None if name == "gsm8k" else 5, arguments.data_dir)
        rows.append(compare(ours, theirs, benchmark, arguments.documents))
        print(rows[-1], flush=True)
        about = {"source": arguments.source, "torch": torch.__version__, "dtype": "float32", "shots": 5}
        write_json(arguments.output, about | {"tasks": rows})


if __name__ == "__main__":
    main()
