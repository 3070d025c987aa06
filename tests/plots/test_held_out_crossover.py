"""When feedback paid is told by held-out loss, in the table and in the picture."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fullband.plots.runs import Evaluation, RunRecord, held_out_crossover, read_run
from fullband.plots.runs_page import held_out_words, loss_chart, marks_of
from plots.test_runs import write_run


def evaluations(*losses: tuple[float, float]) -> list[Evaluation]:
    return [Evaluation(10 * n + 9, n + 1.0, n + 1.0, {"0": plain, "1": fed}) for n, (plain, fed) in enumerate(losses)]


@pytest.mark.parametrize(
    ("found", "step", "words"),
    [
        (evaluations((3.0, 3.5), (2.5, 2.4), (2.2, 2.0)), 19, "20"),
        (evaluations((3.0, 2.9), (2.5, 2.6)), None, "not yet"),
        (evaluations((3.0, 2.9), (2.5, 2.6), (2.2, 2.1)), 29, "30"),
        ([Evaluation(9, 1.0, 1.0, {"0": 2.0})], None, "not evaluated"),
        ([], None, "not evaluated"),
    ],
)
def test_it_is_where_feedback_came_to_stay_below_the_loss_without_it(found: list[Evaluation], step: int | None, words: str) -> None:
    assert held_out_crossover(found) == step
    assert held_out_words(RunRecord("run", [], found, {}, None)) == words


def test_the_picture_marks_both_crossovers(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "fed", [1, 2, 2, 2, 2], {1: {"0": 2.5, "1": 2.6}, 4: {"0": 2.2, "1": 2.1}}, crossover=3))
    assert [(mark.label, mark.x) for mark in marks_of([run])] == [
        ("feedback on", 30e-6),
        ("crossover in training", 70e-6),
        ("crossover held out", 90e-6),
    ]
    chart = loss_chart([run]).html()
    assert len(re.findall(r'class="mark run-1"', chart)) == 2 * 3, "three at the desk, three on the phone"
    assert all(word in chart for word in ("crossover in training", "crossover held out"))


def test_a_crossover_in_training_alone_is_not_one_that_paid(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "fed", [1, 2, 2], {1: {"0": 2.5, "1": 2.6}, 2: {"0": 2.2, "1": 2.3}}, crossover=2))
    assert [mark.label for mark in marks_of([run])] == ["feedback on", "crossover in training"]


def test_marks_of_several_runs_are_named_while_there_is_room(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / f"run-{n}", [1, 2, 2], {2: {"0": 2.2, "1": 2.1}}, crossover=2)) for n in range(3)]
    assert [mark.label for mark in marks_of(runs[:2])][-1] == "crossover held out, run-1"
    assert {mark.label for mark in marks_of(runs)} == {""} and len(marks_of(runs)) == 9
