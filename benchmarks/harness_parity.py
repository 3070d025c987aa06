"""Standard mode against lm-eval's own Hugging Face model: every log-likelihood and every greedy answer, on the first documents of a task,
and the same model row by row and in batches of 8, where what rows begin with alike is read once.

    python -m benchmarks.harness_parity SOURCE CONVERTED --data-dir DATA --documents 2 --output results/evaluate/parity.json

SOURCE is a Hugging Face checkpoint, CONVERTED what `fullband convert` made of it. Tasks run one after the other, and each is written when
it is done; comparisons that the output has already with as many documents are not run again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from fullband.files import write_json

TASKS = ("copa", "openbookqa", "winogrande", "piqa", "arc_easy", "arc_challenge", "truthfulqa_mc2", "rte", "boolq", "mmlu", "gsm8k")


def compare(ours: Any, theirs: Any, benchmark: Any, documents: int) -> dict[str, Any]:
    """Largest difference of a log-likelihood, and how many texts or greedy flags differ, over all requests of the first documents."""
    from fullband.evaluate.harness.choice import requests_of

    started = time.perf_counter()
    instances = [instance for own in requests_of(benchmark, documents).values() for instance in own]
    counted = {"documents": len(_documents(instances)), "requests": len(instances)}
    found = {"task": benchmark.name} | counted | _differences(instances, ours, theirs)
    return found | {"seconds": round(time.perf_counter() - started, 1)}


def compare_batches(ours: Any, benchmark: Any, documents: int, batch_rows: int = 8) -> dict[str, Any]:
    """The same, between the model alone with each request and in batches of `batch_rows`."""
    from fullband.evaluate.harness.choice import requests_of
    from fullband.evaluate.harness.model import FullBandLM

    instances = [instance for own in requests_of(benchmark, documents).values() for instance in own]
    chosen = _documents(instances)[:documents]
    instances = [instance for instance in instances if (instance.task_name, instance.doc_id) in chosen]
    batched = FullBandLM(ours.model, tokenizer=ours.text, batch_size=batch_rows)
    return {"batch_rows": batch_rows, "documents": len(chosen), "requests": len(instances)} | _differences(instances, ours, batched)


def _documents(instances: list[Any]) -> list[tuple[str, int]]:
    return list(dict.fromkeys((instance.task_name, instance.doc_id) for instance in instances))


def _differences(instances: list[Any], ours: Any, others: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"largest_difference": 0.0, "greedy_differ": 0}
    for kind in dict.fromkeys(instance.request_type for instance in instances):  # subjects of MMLU share batches
        own = [instance for instance in instances if instance.request_type == kind]
        for one, other in zip(*(getattr(model, kind)(own, disable_tqdm=True) for model in (ours, others)), strict=True):
            if kind == "generate_until":
                found["greedy_differ"] += one != other
            else:
                found["largest_difference"] = max(found["largest_difference"], abs(one[0] - other[0]))
                found["greedy_differ"] += one[1] != other[1]
    return found


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
    about = {"source": Path(arguments.source).name, "torch": torch.__version__, "dtype": "float32", "shots": 5}
    about |= {"asked": arguments.documents}
    rows: list[dict[str, Any]] = []
    if arguments.output.is_file():
        before = json.loads(arguments.output.read_text(encoding="utf-8"))
        rows = before["tasks"] if {key: before.get(key) for key in about} == about else []
    for name in arguments.tasks.split(","):
        generates = name == "gsm8k"
        [benchmark] = load_benchmarks([name], None if generates else 5, arguments.data_dir)
        row = next((row for row in rows if row["task"] == name), None)
        if row is None:
            row = compare(ours, theirs, benchmark, min(arguments.documents, 20) if generates else arguments.documents)
            rows.append(row)
            write_json(arguments.output, about | {"tasks": rows})
        if not generates and "batches" not in row:
            row["batches"] = compare_batches(ours, benchmark, min(arguments.documents, 8))
            write_json(arguments.output, about | {"tasks": rows})
        print(row, flush=True)


if __name__ == "__main__":
    main()
