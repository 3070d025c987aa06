"""The data of `describe` as tables in the terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from fullband.amounts import mixture, percent, short, size
from fullband.cli.fitting import fitted

PARTS = {
    "embedding": "embedding (and head)",
    "attention": "attention",
    "glu": "GLU",
    "norms": "norms",
    "head_gates": "head gates",
    "fusion": "fusion",
}


def table(columns: list[str], words: int = 1) -> Table:
    """A table whose first `words` columns are words and the others numbers."""
    made = Table(box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number < words else "right")
    return made


def print_table(console: Console, title: str, made: Table, note: str = "") -> None:
    """Title and note are as wide as the terminal, whatever the table's width; the table is made to fit it."""
    console.print(title, style="bold")
    for part in fitted(made, console.width):
        console.print(part)
    if note:
        console.print(f"{note}\n")


def print_model(console: Console, name: str, model: dict[str, Any]) -> None:
    shape = model["shape"]
    full = ", ".join(map(str, model["shape"]["full_layers"])) or "none"
    console.print(
        f"{name}: {shape['layers']} layers of width {shape['width']}, {shape['heads']}/{shape['kv_heads']} heads of {shape['head_dim']}, "
        f"GLU {shape['glu_width']}, vocabulary {shape['vocab_size']:,}\ncontext {shape['context']}, window {shape['window']} "
        f"(full attention in layers: {full}), fusion {model['fusion']}\n"
    )
    print_parameters(console, model)
    print_flops(console, model)


def print_parameters(console: Console, model: dict[str, Any]) -> None:
    parameters = model["parameters"]
    made = table(["part", "parameters", "share"])
    for part, label in PARTS.items():
        made.add_row(label, f"{parameters[part]:,}", percent(parameters[part] / parameters["total"]))
    made.add_section()
    made.add_row("total", f"{parameters['total']:,}", "")
    print_table(console, "Parameters", made)


def print_flops(console: Console, model: dict[str, Any]) -> None:
    per_pass, decoding = model["flops_per_token_and_pass"], model["decoding"]
    columns = (per_pass["plain"], per_pass["fused"], decoding["flops_per_token"])
    made = table(["", "plain pass", "fused pass", f"decoded at {decoding['context']}"])
    for part in ("matrices", "attention", "head", "fusion"):
        made.add_row(part, *(short(column[part]) for column in columns))
    made.add_section()
    made.add_row("forward", *(short(column["forward"]) for column in columns))
    made.add_row("training", *(short(column["training"]) for column in columns[:2]), "")
    print_table(
        console,
        f"FLOPs per token in sequences of {per_pass['length']} (multiply-adds x 2)",
        made,
        "Training costs three forward passes. "
        f"The fusion is {percent(decoding['fusion_share'])} of a decoded token (the paper: under 1% at its size).",
    )


def print_decoding_memory(console: Console, model: dict[str, Any]) -> None:
    decoding = model["decoding"]
    made = table(["", "weights", "cache", "total"])
    for dtype, memory in decoding["memory"].items():
        made.add_row(dtype, size(memory["weights"]), size(memory["cache_per_row"]), size(memory["total"]))
    print_table(
        console,
        f"Memory for decoding one sequence of the full context of {decoding['context']} tokens",
        made,
        "Sliding layers keep only their window. While the cache grows it may take twice as much.",
    )


def print_training_memory(console: Console, memory: dict[str, Any]) -> None:
    checkpointed = ", activation checkpointing" if memory["activation_checkpointing"] else ""
    made = table(["passes", "weights", "gradients", "optimizer", "activations", "total", "with an empty prefix"])
    for k, part in memory["passes"].items():
        names = ("weights", "gradients", "optimizer", "activations", "total", "worst_total")
        made.add_row(str(k), *(size(part[name]) for name in names))
    print_table(
        console,
        f"Memory for training, estimated: microbatch of {memory['rows']} x {memory['length']}, {memory['dtype']}{checkpointed}",
        made,
        "Later passes reuse their prefix: activations and total assume its mean length; the last column is the worst case.",
    )


def print_run(console: Console, run: dict[str, Any]) -> None:
    from fullband.optim.wsd import warmup_words

    cost = run["cost"]
    made = table(["steps", "passes"], words=2)
    for span in run["schedule"]:
        made.add_row(f"{span['first_step']:,} to {span['stop_step'] - 1:,}", mixture(span["passes"]))
    notes = [warmup_words(run["steps"], run["warmup"]["in_recipe"])]
    notes += ["the schedule is adaptive: the share of deeper passes follows measurements"] * run["adaptive"]
    print_table(
        console,
        f"Schedule: {run['steps']:,} steps of {run['tokens_per_step']:,} tokens",
        made,
        "\n".join(notes),
    )
    made = table(["compute", "expected"])
    made.add_row("tokens", short(cost["tokens"]))
    made.add_row("token-equivalent compute (tokens x passes)", short(cost["token_equivalent"]))
    made.add_row("positions computed (prefixes are reused)", short(cost["executed_positions"]))
    if "flops" in cost:
        made.add_row("FLOPs", f"{cost['flops']:.2e}")
        made.add_row("FLOPs with whole passes", f"{cost['naive_flops']:.2e}")
    print_table(console, "Compute", made)
    if "training_memory" in run:
        print_training_memory(console, run["training_memory"])


def print_paper_runs(console: Console, runs: list[dict[str, Any]]) -> None:
    made = table(["run", "passes", "tokens", "token-equivalent", "paper prints", "computed", "FLOPs", "naive FLOPs"], words=2)
    for run in runs:
        cost = run["cost"]
        star = "" if abs(run["paper_prints"] / cost["token_equivalent"] - 1) < 0.01 else "*"
        made.add_row(
            run["run"],
            mixture(run["mixture"]),
            short(cost["tokens"]),
            short(cost["token_equivalent"]),
            short(run["paper_prints"]) + star,
            short(cost["executed_positions"]),
            f"{cost['flops']:.2e}",
            f"{cost['naive_flops']:.2e}",
        )
    print_table(
        console,
        "Runs of the paper's section 4, in sequences of 8192 tokens",
        made,
        "* By the paper's own rule, tokens x passes, its first run is 30B, not 40B.\n"
        "computed: positions that are really computed, since later passes reuse their plain prefix "
        "(compiled, they start at eighths of a sequence); naive: without reuse.",
    )
