"""What is shown while something runs: in a terminal and outside of one."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
import torch
from rich.console import Console

from cli.commands import RECIPE
from fullband import amounts
from fullband.cli.progress import Pace, ProgressLines, forward_progress
from fullband.config import Recipe
from fullband.feedback.by_passes import positions_to_run
from fullband.training import train
from fullband.training.progress import TrainingProgress
from fullband.training.run import prepare
from fullband.training.work import Work
from reference.seam import read


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, force_interactive=True, color_system=None, width=160)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_bar_in_a_terminal(tmp_path) -> None:
    console = terminal()
    with TrainingProgress(console) as progress:
        train(Recipe.model_validate(RECIPE | {"output": str(tmp_path)}), watcher=progress)
    text = written(console)
    assert "20/20" in text and "tokens/s" in text and "token-equivalent" in text and "left" in text
    assert "switched on" in text and "step 20  validation loss by feedback passes" in text


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_a_narrow_bar_keeps_the_step_and_the_time_left(tmp_path, width: int) -> None:
    console = terminal()
    console.width = width
    recipe = RECIPE | {"output": str(tmp_path), "evaluation": {"rows": 0}}
    with TrainingProgress(console) as progress:
        train(Recipe.model_validate(recipe), watcher=progress)
        shown = progress.bar
    assert shown is not None
    text = str(shown.tasks[0].description)
    assert text.startswith("0s left") and "20/20" in written(console)
    assert "…" not in written(console)
    frames = [line for line in written(console).replace("\r", "\n").splitlines() if "20/20" in line]
    assert all("left" in line for line in frames) and ("loss" in text) == (width > 40 or len(text) > 8)


def test_training_in_python_shows_progress_where_somebody_looks(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = RECIPE | {"evaluation": {"rows": 0}}
    shown = io.StringIO()
    monkeypatch.setattr("sys.stderr", shown)
    train(Recipe.model_validate(recipe | {"output": str(tmp_path / "quiet")}))
    assert shown.getvalue() == ""
    monkeypatch.setattr(shown, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    train(Recipe.model_validate(recipe | {"output": str(tmp_path / "terminal")}))
    assert "20/20" in shown.getvalue() and "left" in shown.getvalue()
    notebook: list[str] = []
    monkeypatch.setattr("rich.jupyter.display", lambda segments, text: notebook.append(text))
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    train(Recipe.model_validate(recipe | {"output": str(tmp_path / "notebook")}))
    assert "step 20/20" in "".join(notebook)


def test_lines_elsewhere(tmp_path) -> None:
    console = Console(file=io.StringIO(), width=100)
    with TrainingProgress(console, lines_every=0.0) as progress:
        train(Recipe.model_validate(RECIPE | {"output": str(tmp_path)}), watcher=progress)
    lines = [line for line in written(console).splitlines() if line.startswith("step ") and "/20  " in line]
    assert len(lines) == 20
    assert "1: " in lines[0] and "2: " not in lines[0] and "2: " in lines[-1]


def test_the_time_left_counts_passes_not_steps(tmp_path) -> None:
    run = prepare(Recipe.model_validate(RECIPE | {"output": str(tmp_path)}), resume=False)
    work = Work.of(run.schedule.config, run.recipe.train, run.loader.length)
    half = 10 * (1 + 1.5 * 0.5)  # two or three passes, of which the later ones run half the positions
    assert work.remaining(10) == pytest.approx(half)
    assert work.remaining(0) == pytest.approx(10 + half)
    assert work.remaining(20) == 0


@pytest.mark.parametrize("feedback_passes", [0, 2, "exact"])
def test_reading_shows_a_bar_only_if_it_takes_long(isometric_model, feedback_passes) -> None:
    model, tokens = isometric_model(), torch.randint(23, (2, 20))
    for patience in (0.0, 60.0):
        console = terminal()
        with forward_progress(console, model, 40 * 100, "reading", patience):
            read(model, tokens, feedback_passes)
        assert ("reading" in written(console)) == (patience == 0.0)
    assert not model.trunk._forward_hooks


@pytest.mark.parametrize(("patience", "lines"), [(0.0, ["reading"]), (60.0, [])])
def test_reading_says_that_it_takes_long_outside_of_a_terminal(isometric_model, patience: float, lines: list[str]) -> None:
    console, model = Console(file=io.StringIO()), isometric_model()
    with forward_progress(console, model, 80, "reading", patience):
        read(model, torch.zeros(1, 20, dtype=torch.long), 3)
    assert written(console).splitlines() == lines


def test_lines_come_when_something_begins_and_then_seldom() -> None:
    console = Console(file=io.StringIO())
    rare, often = ProgressLines(console), ProgressLines(console, every=0.0)
    for lines in (rare, often):
        for what, done in (("reading", "1 of 9"), ("reading", "2 of 9"), ("generating", "0 of 4")):
            lines.say(what, done)
    assert written(console).splitlines() == ["reading", "generating", "reading", "reading  2 of 9", "generating"]


def test_positions_to_run() -> None:
    assert [positions_to_run(10, passes) for passes in ([0], [2], [0, 3], ["exact"], [0, 1, "exact"])] == [10, 30, 40, 10, 30]


def test_amounts() -> None:
    assert [amounts.short(n) for n in (0, 12, 999.9, 94_000, 1.256e9, 512e9)] == ["0", "12", "1K", "94K", "1.26B", "512B"]
    assert [amounts.size(n) for n in (3 * 2**10, 96 * 2**20, 4.9 * 2**30)] == ["3 KiB", "96.0 MiB", "4.9 GiB"]
    assert [amounts.duration(n) for n in (7.6, 200, 7500, 273600)] == ["8s", "3m 20s", "2h 05m", "3d 04h"]
    assert amounts.mixture({1: 0.75, 2: 0.22, 3: 0.03}) == "75% one-pass, 22% two-pass, 3% three-pass"


def test_single_positions_have_a_pace_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,100 positions, 100 are run one by one, each as slow as 100 of the others."""
    clock = [0.0]
    monkeypatch.setattr("fullband.cli.progress.time.perf_counter", lambda: clock[0])
    pace = Pace(1100, single=100)
    clock[0] = 10.0
    pace.count(2, 500)
    assert pace.positions == 1000 and pace.time_left() == "?", "nothing is known of single ones yet"
    for _ in range(20):
        clock[0] += 1.0
        pace.count(1, 1)
    assert pace.positions == 1020 and pace.time_left() == amounts.duration(80.0)
    one = Pace(200, single=0)
    clock[0] += 5.0
    one.count(1, 1)
    assert one.time_left() == amounts.duration(199 * 5.0)


def test_evaluating_exactly_says_what_it_will_take(isometric_model, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from fullband.cli import progress
    from fullband.cli.evaluate_loss import say_what_exact_takes
    from fullband.data.packing import as_document

    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    documents = [as_document(np.arange(length) % 23) for length in (30, 20, 12)]
    say_what_exact_takes(isometric_model(), documents, 60)
    assert re.fullmatch(
        r"exact evaluation: 42 steps, one position at a time, about \d+s; fewer with --documents\n", capsys.readouterr().err
    )
    monkeypatch.setattr(progress, "PATIENCE", 1e9)
    say_what_exact_takes(isometric_model(), documents, 60)
    assert capsys.readouterr().err == ""
