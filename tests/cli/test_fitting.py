"""Tables in narrow terminals: all that was in them is still there, and no number is broken."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fullband.cli.describe import describe_paper_runs, describe_training_memory
from fullband.cli.fitting import folded
from fullband.cli.tables import print_paper_runs, print_table, print_training_memory, table
from fullband.costs import PAPER
from fullband.feedback_config import FeedbackConfig
from fullband.presets import TRUNKS


def printed(width: int, show: object, *arguments: object) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    show(console, *arguments)  # type: ignore[operator]
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    return str(text)


def show_grid(console: Console, columns: int, rows: int) -> None:
    made = table(["name", *(f"heading number-{n}" for n in range(columns))])
    for row in range(rows):
        made.add_row(f"run {row}", *(f"{row}{n:04d}.125" for n in range(columns)))
    print_table(console, "a title", made)


@pytest.mark.parametrize("width", [30, 40, 60, 80, 140])
@pytest.mark.parametrize(("columns", "rows"), [(3, 2), (12, 3), (5, 40), (12, 12), (1, 1), (2, 0)])
def test_every_number_is_whole(width: int, columns: int, rows: int) -> None:
    text = printed(width, show_grid, columns, rows)
    for row in range(rows):
        assert all(f"{row}{n:04d}.125" in text.split() for n in range(columns))
    assert text.split().count("name") >= 1 and all(f"number-{n}" in text.replace("-\n", "-") or f"{n}" in text for n in range(columns))


def test_a_wide_terminal_changes_nothing() -> None:
    text = printed(140, show_grid, 3, 2)
    assert "heading number-0   heading number-1" in text


def test_the_papers_table_in_80_columns() -> None:
    trunk = TRUNKS["paper-1b"]
    text = printed(80, print_paper_runs, describe_paper_runs(trunk))
    assert {"paper-10b", "paper-400b", "40B*", "9.44e+20", "3.75e+21", "three-pass", "token-equivalent"} <= set(text.split())
    memory = describe_training_memory(trunk, PAPER, 1, trunk.context, "bfloat16", [1, 2, 3], FeedbackConfig())
    assert "67.2 GiB" in printed(80, print_training_memory, memory)


def test_runs_side_by_side_in_80_columns() -> None:
    from fullband.cli.compare_runs import print_comparison

    losses = {"0": 1.67, "1": 1.6523, "2": 1.6488, "exact": 1.64}
    run = {
        "name": "convert-smollm2", "steps": 12000, "tokens": 1.2e8, "token_equivalent_compute": 3.4e8, "executed_positions": 2.9e8,
        "switch_on_shock": 1.234, "switch_on_step": 500, "crossover_step": None, "at_equal_compute": {"losses": losses},
        "at_equal_tokens": {"losses": losses},
    }  # fmt: skip
    found = {"runs": [run, run | {"name": "convert-smollm2-plain"}], "equal_compute": 3e8, "equal_tokens": 1e8, "differing_data": []}
    text = printed(80, print_comparison, found)
    assert text.count("exact: 1.6400") == 4 and "convert-smollm2-plain" in text.replace("-\n", "-") and "+1.234" in text


def test_folded() -> None:
    assert folded("0: 1.67, exact: 1.64", 9) == "0: 1.67,\nexact: 1.64" and folded("loss at equal compute", 7) == "loss at\nequal\ncompute"
    assert folded("token-equivalent", 10, "-") == "token-\nequivalent" and folded("", 3) == ""
