"""Runs side by side: losses at equal compute are those of the last evaluation until then, and the page holds all of it."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from cli.commands import fullband, refused
from fullband.plots.runs import compare, differing_of, read_run
from fullband.plots.runs_page import loss_chart, page, runs_charts
from fullband.plots.style import colour_key


def write_run(folder: Path, passes: list[int], evaluated: dict[int, dict[str, float]], crossover: int | None = None) -> Path:
    """Steps of 10 tokens that take these numbers of passes, evaluated after some of them."""
    folder.mkdir()
    entries: list[dict[str, Any]] = []
    compute = executed = 0
    for step, k in enumerate(passes):
        compute, executed = compute + 10 * k, executed + 10 + 5 * (k - 1)
        losses = {f"loss_pass_{n}": 3.0 - 0.1 * step for n in range(1, k + 1)}
        on = next((s for s, n in enumerate(passes[: step + 1]) if n > 1), None)
        entries.append(
            {"step": step, "passes": k, "objective": 1.0, "tokens": 10 * (step + 1), "token_equivalent_compute": compute}
            | {"executed_positions": executed, "switch_on_shock": None if on is None else 0.25, "crossover_step": crossover}
            | losses
        )
        if step in evaluated:
            entries.append({"step": step, "validation": evaluated[step]})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Two passes a step against one: equal compute is reached by the plain run after twice the steps, of which it has some more."""
    fed = write_run(tmp_path / "fed", [1, 2, 2, 3], {1: {"0": 2.5, "1": 2.6}, 3: {"0": 2.2, "1": 2.1}}, crossover=3)
    plain = write_run(tmp_path / "plain", [1] * 10, {3: {"0": 2.3}, 7: {"0": 1.9}, 9: {"0": 1.5}})
    return [fed, plain]


def test_losses_at_equal_compute_and_at_equal_tokens(folders: list[Path]) -> None:
    found = compare([read_run(folder) for folder in folders])
    assert (found["equal_compute"], found["equal_tokens"]) == (80, 40)
    fed, plain = found["runs"]
    assert fed["at_equal_compute"]["losses"] == {"0": 2.2, "1": 2.1} == fed["at_equal_tokens"]["losses"]
    assert plain["at_equal_compute"]["losses"] == {"0": 1.9} and plain["at_equal_compute"]["compute"] == 80  # not the later 1.5
    assert plain["at_equal_tokens"]["losses"] == {"0": 2.3}
    assert (fed["switch_on_step"], fed["switch_on_shock"], fed["crossover_step"]) == (1, 0.25, 3)
    assert plain["switch_on_step"] is None and plain["switch_on_shock"] is None
    assert (fed["steps"], fed["executed_positions"]) == (4, 60)


def give_data(folder: Path, files: str | None, paths: str, rows: int = 64) -> None:
    (folder / "recipe.yaml").write_text(f"data: {{source: {{paths: [{paths}]}}}}\nevaluation: {{rows: {rows}}}\n", encoding="utf-8")
    if files is not None:
        checkpoint = folder / "checkpoints" / "step-00000001"
        checkpoint.mkdir(parents=True, exist_ok=True)
        data = {"source": "files, held out 0.02", "files": files, "shuffle": str(rows)}
        (checkpoint / "training.json").write_text(json.dumps({"identity": {"data": data}}))
        (folder / "checkpoints" / "last.json").write_text('{"checkpoint": "step-00000001"}')


def test_runs_on_different_data_say_so(folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fullband.plots.gallery.write_gallery", lambda sources, output: [])

    def said() -> list[str]:
        return differing_of([read_run(folder) for folder in folders])

    assert said() == [], "nothing is known"
    give_data(folders[0], "1 files, sha256 aa", "a.txt")
    give_data(folders[1], "1 files, sha256 aa", "/there/a.txt", rows=64)
    assert said() == [], "the same files by another name"
    give_data(folders[1], "1 files, sha256 bb", "a.txt", rows=32)
    assert said() == ["files: 1 files, sha256 aa (fed); 1 files, sha256 bb (plain)", "held-out rows: 64 (fed); 32 (plain)"]
    shown = fullband("compare-runs", *folders, "-o", tmp_path / "page.html").out
    drawn = fullband("plot", *folders, "-o", tmp_path / "figures").out
    for text in (shown, drawn, (tmp_path / "page.html").read_text(encoding="utf-8")):
        assert "used different data" in text and all(line in text for line in said())
    (folders[1] / "checkpoints" / "last.json").unlink()
    give_data(folders[1], None, "b.txt")
    assert [line.split(":")[0] for line in said()] == ["recipe"], "by the recipes, where a checkpoint is gone"
    (folders[1] / "recipe.yaml").write_text("- [")
    assert said() == [], "what cannot be read is not known"


def test_the_switch_on_step_is_the_runs_own_where_its_log_says_it(tmp_path: Path) -> None:
    """A run that logs every tenth step feeds back before the first step that shows it."""
    folder = write_run(tmp_path / "sparse", [1, 1, 2], {})
    path = folder / "metrics.jsonl"
    assert read_run(folder).switch_on_step == 2
    *before, last = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([*before, json.dumps(json.loads(last) | {"switch_on_step": 1})]) + "\n", encoding="utf-8")
    assert read_run(folder).switch_on_step == 1


def test_a_run_that_was_not_evaluated_until_then_has_no_loss_there(tmp_path: Path, folders: list[Path]) -> None:
    late = write_run(tmp_path / "late", [1] * 12, {11: {"0": 1.0}})
    assert compare([read_run(folders[0]), read_run(late)])["runs"][1]["at_equal_compute"] is None


def test_the_page_holds_picture_and_numbers(folders: list[Path], tmp_path: Path) -> None:
    text = page([read_run(folder) for folder in folders])
    for part in ("<svg", "fed", "plain", "+0.250", "0: 2.2000, 1: 2.1000", "0: 1.9000"):
        assert part in text, part
    assert "src=" not in text and "<link" not in text  # it opens offline
    assert "<svg" in page([read_run(folders[1])])
    assert runs_charts([read_run(folders[1])]).count("<figure") == 1, "no gradient norms and learning rates were logged"


def test_runs_have_a_colour_each_and_numbers_of_passes_their_dashes(folders: list[Path]) -> None:
    chart = loss_chart([read_run(folder) for folder in folders]).html()
    looks = re.findall(
        r'<li><svg class="swatch".*?<path class="([^"]*)"[^>]*?(?:stroke-dasharray="([^"]*)")?/>.*?</svg>([^<]*)</li>', chart
    )
    assert looks == [
        ("run-1", "1.5 3.5", "fed, without feedback"),
        ("run-1", "", "fed, 1 feedback pass"),
        ("run-2", "1.5 3.5", "plain, without feedback"),
    ]
    assert 'class="run-1 faint"' in chart and 'class="run-2 faint"' in chart, "the training losses in the background"


def test_gradient_norm_and_learning_rates_are_drawn_where_they_were_logged(folders: list[Path]) -> None:
    path = folders[0] / "metrics.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    for n, entry in enumerate(entries):
        if "objective" in entry:
            entry |= {"gradient_norm": 0.5 + n, "matrix_lr": 0.01, "adam_lr": None if n == 1 else 0.001}
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    runs = [read_run(folder) for folder in folders]
    assert runs[0].steps.compute == [10, 30, 50, 80] and runs[1].steps.rates == {}
    charts = runs_charts(runs)
    data = [json.loads(html.unescape(found)) for found in re.findall(r"data-chart='([^']*)'", charts)][::2]
    assert [[line["label"] for line in chart["lines"]][:2] for chart in data[1:]] == [["fed"], ["fed, matrices", "fed, the rest"]]
    assert data[1]["lines"][0]["y"] == [0.5, 1.5, 3.5, 4.5] and set(data[2]["lines"][0]["y"]) == {0.01}


def test_the_axes_of_the_pages_picture_begin_at_the_data(folders: list[Path]) -> None:
    data = json.loads(html.unescape(re.findall(r"data-chart='([^']*)'", loss_chart([read_run(folders[1])]).html())[0]))
    assert data["x"]["low"] == 10e-6 and data["x"]["high"] == 100e-6


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tokens": "many"}, "step 1: tokens: must be a number, got 'many'"),
        ({"loss_pass_2": None}, "step 1: loss_pass_2 must be a number, got None"),
        ({"passes": 0}, "step 1: passes: must be at least 1, got 0"),
        ({"validation": {}}, "step 1: validation: "),
    ],
)
def test_numbers_of_another_kind_are_named(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    path = write_run(tmp_path / "run", [1, 2], {}) / "metrics.jsonl"
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{json.dumps(json.loads(second) | changed)}\n")
    line = refused("plot", path.parent, "-o", tmp_path / "figures")
    assert f"{path}: {said}" in line


@pytest.mark.parametrize("lost", [[1], [0, 1, 2]])
def test_losses_that_are_not_finite_are_gaps(tmp_path: Path, lost: list[int]) -> None:
    folder = write_run(tmp_path / "run", [1, 2, 2], {2: {"0": 2.0, "1": float("inf")}})
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for step in lost:
        entries[step] |= {key: float("nan") for key in entries[step] if key.startswith("loss_pass_")}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    done = fullband("plot", folder, "-o", tmp_path / "figures")
    assert done.code == 0, done.err
    assert "NaN" not in (tmp_path / "figures" / "index.html").read_text(), "the page's script reads JSON"
    assert fullband("compare-runs", folder, "-o", tmp_path / "runs.html").code == 0


def test_pictures_of_many_runs_are_several(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / f"run-{n}", [1, 2], {1: {"0": 2.0}})) for n in range(9)]
    assert page(runs[:8]).count("<figure") == 1 and page(runs).count("<figure") == 2


def test_deeper_evaluations_share_the_nearest_colour() -> None:
    found = [colour_key(f"fused-{passes}") for passes in ("0", "1", "3", "20", "exact", "converged")]
    assert found == ["fused-0", "fused-1", "fused-2", "fused-16", "exact", "exact"]
    assert colour_key("standard") == "standard" and colour_key("exact") == "exact"


def test_the_command(folders: list[Path], tmp_path: Path) -> None:
    done = fullband("compare-runs", *folders, "-o", tmp_path / "runs.html", "--json")
    assert done.code == 0 and done.json["equal_compute"] == 80 and (tmp_path / "runs.html").is_file()
    table = fullband("compare-runs", *folders)
    assert "at equal tokens" in " ".join(table.out.split()) and "+0.250" in table.out
    assert "not a run folder (it has no metrics.jsonl)" in refused("compare-runs", tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    assert "no step has been logged yet" in refused("compare-runs", tmp_path)
    for content, words in (
        ("5\n", "metrics.jsonl:1: no entry"),
        ('{"step": 1, "objective": 2.0}\n', "do not say 'passes'"),
        ("\xff\n", "metrics.jsonl:1: damaged"),
    ):
        (tmp_path / "metrics.jsonl").write_bytes(content.encode("latin-1"))
        assert words in refused("compare-runs", tmp_path)
