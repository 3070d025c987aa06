"""Reports from folders written by hand: what stands in them, the paper's tables, the heading of small tables."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from drawing import undrawn
from fullband.evaluate.evaluation import Journals
from fullband.evaluate.generative.problems import TASKS
from fullband.evaluate.plan import EvaluationPlan, check_folder, start
from fullband.evaluate.report.compare import compare_runs
from fullband.evaluate.report.markdown import answer_text, markdown
from fullband.evaluate.report.results import build_results, write_results
from fullband.evaluate.report.tables import PAPER, score, tables_of
from fullband.plots.evaluation_page import page, plot_evaluation, plot_passes

MODEL = {"name": "models/mine", "parameters": 1000, "weights": "0" * 64, "dtype": "float32", "device": "cpu", "plain": False}
PUBLISHED = [path.parent for path in sorted((Path(__file__).parents[3] / "results" / "evaluate").glob("*/results.json"))]
ZERO_SHOT = ("winogrande", "piqa", "openbookqa", "arc_easy", "arc_challenge")


def write_run(folder: Path, documents: int, better: float = 0.0, shard: tuple[int, int] = (0, 1), plain: bool = False) -> EvaluationPlan:
    """Tasks: right in half of the documents, and in `better` more of them after one pass. GSM8K in two modes, MBPP at two temperatures.

    plain  read as a baseline is
    """
    plan = EvaluationPlan(
        suite="paper-0shot", tasks=ZERO_SHOT, shots=0, generative=("gsm8k", "mbpp"), readings=(0, 1), modes=("standard", "soft"),
        prompts="chat", temperatures=(0.3, 0.7), n=2, k=2, shard=shard,
    )  # fmt: skip
    plan = plan.of_baseline() if plain else plan
    start(folder, plan, MODEL)
    journals = Journals.open(folder)
    mine = range(shard[0], documents, shard[1])
    about: dict[str, Any] = {"data_hash": "d", "prompt_hash": ["p"], "seconds": 1.0}
    for task in plan.tasks:
        records = {}
        for i in mine:
            scores = {"0": {"acc": float(i % 2)}, "1": {"acc": float(i % 2 or i < 2 * better * documents)}}
            asked = {str(reading): scores[str(reading)] for reading in plan.readings}
            records[f"{task}/{task}/{i}"] = {"task": task, "document": i, "prompt_hash": "p", "scores": asked}
        journals.documents.add(records)
        journals.tasks.add({f"task/{task}": about | {"kind": "task", "metric": "acc", "shots": 0}})
    for name in plan.generative:
        for setting in plan.settings(name):
            right = setting.mode == "soft"
            rollout = {"text": f"<{setting.mode}> `x` | y", "tokens": 5 if right else 9, "finish": "stop" if right else "length"}
            journals.rollouts.add(
                (setting.key(i), {"question": f"{i} < {name}?", "cut": 0, "rollouts": [rollout] * setting.n}) for i in mine
            )
            verdicts = ["right" if right else "undecided"] * setting.n
            journals.grades.add((setting.key(i), {"verdicts": verdicts, "details": [""] * setting.n}) for i in mine)
        journals.tasks.add({f"task/{name}": about | {"kind": "generative", "problems": list(mine)}})
    return plan


def test_the_papers_tables_stand_beside_ours(tmp_path: Path) -> None:
    write_run(tmp_path, 200, better=0.25)
    tables = {table.title: table for table in tables_of(write_results(tmp_path))}
    second = tables["Table 2 of the paper, and here"]
    assert second.rows[-3] == ["full-bandwidth 1B, 200B tokens, 1 feedback pass", "62.59", "71.49", "35.00", "63.43", "35.41", "53.58"]
    assert second.rows[-1] == ["here: 1 pass", *["75.0 ± 3.1"] * 5, "75.0 ± 1.4"]
    first = tables["Table 1 of the paper, and here"]
    assert first.columns == ["model", "GSM8K", "MBPP"]
    assert first.rows[1] == ["full-bandwidth 200B, soft", "67.93", "39.80"]
    assert first.rows[-1] == ["here: Soft", "100.0 ± 0.0", "100.0 ± 0.0"]
    assert tables["Differences"].rows[0] == ["winogrande", "1 pass − 0 passes", "+25.0 ± 3.1", "0", "50", "1.78e-15"]
    assert tables["Length of answers"].rows[0] == ["GSM8K", "Standard", "-", "-", "-", "0", "200", "200"]
    assert tables["Length of answers"].rows[1] == ["GSM8K", "Soft", "5", "5", "5", "200", "0", "0"]
    assert "temperatures" in " ".join(tables).lower() and len(tables["Temperatures"].rows) == 2


def test_the_baseline_has_its_line_in_the_papers_tables(tmp_path: Path) -> None:
    write_run(tmp_path, 200, better=0.25)
    write_run(tmp_path / "baseline", 200, plain=True)
    tables = {table.title: table for table in tables_of(write_results(tmp_path))}
    assert tables["Table 2 of the paper, and here"].rows[-1] == ["here: baseline", *["50.0 ± 3.5"] * 5, "50.0 ± 1.6"]
    assert tables["Table 1 of the paper, and here"].rows[-1] == ["here: baseline", "0.0 ± 0.0", "0.0 ± 0.0"]
    with undrawn():
        assert set(plot_evaluation(write_results(tmp_path), tmp_path).values()) == {"figure-4.svg", "figure-5.svg", "figure-6.svg"}


@pytest.mark.shared_data
def test_the_papers_numbers_are_the_papers() -> None:
    shared = Path(os.environ.get("FULLBAND_SHARED") or Path(__file__).parents[4] / "shared")
    path = shared / "paper" / "full-bandwidth-transformer.md"
    if not path.is_file():
        pytest.skip(f"no paper at {path}")
    text, paper = path.read_text(encoding="utf-8"), json.loads(PAPER.read_text(encoding="utf-8"))
    for rows in (paper["table_1"]["rows"], paper["table_2"]["rows"]):
        for name, values in rows.items():
            assert "".join(f"{value:.2f}" for value in values) in text, name


@pytest.mark.parametrize(("documents", "smoke"), [(199, True), (200, False)])
def test_small_tables_are_headed_smoke_test(tmp_path: Path, documents: int, smoke: bool) -> None:
    write_run(tmp_path, documents)
    results = write_results(tmp_path)
    assert results["smoke_test"] is smoke
    assert all(table.title.startswith("Smoke test: ") is smoke for table in tables_of(results))
    assert ("Smoke test: " in markdown(results)) is smoke
    assert ("<h1>Smoke test: models/mine" in page(results, tmp_path, {})) is smoke


def test_a_results_file_alone_gives_the_same_report(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 12, better=0.3)
    results = write_results(tmp_path / "run")
    (tmp_path / "published").mkdir()
    shutil.copy(tmp_path / "run" / "results.json", tmp_path / "published")
    published = write_results(tmp_path / "published")
    assert markdown(published) == markdown(results) and page(published, tmp_path, {}) == page(results, tmp_path, {})


@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda folder: folder.name)
def test_published_reports_are_those_of_the_published_results(folder: Path, tmp_path: Path) -> None:
    """But for the strokes of the pictures, which are matplotlib's."""
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    with undrawn():
        pictures = plot_evaluation(results, tmp_path)
    assert sorted(path.name for path in folder.glob("*.svg")) == sorted(pictures.values())
    assert (folder / "report.md").read_text(encoding="utf-8") == markdown(results, pictures)
    drawn, published = (
        re.sub(r"<svg.*?</svg>", "", html, flags=re.DOTALL)
        for html in (page(results, tmp_path, pictures), (folder / "report.html").read_text("utf-8"))
    )
    assert drawn == published


def test_shards_are_the_whole(tmp_path: Path) -> None:
    write_run(tmp_path / "whole", 12, better=0.3)
    for index in range(3):
        write_run(tmp_path / "parts" / f"shard-{index + 1}-of-3", 12, better=0.3, shard=(index, 3))
    whole, parts = (build_results(tmp_path / name) for name in ("whole", "parts"))
    assert parts["plan"]["shards"] == 3 and parts["seconds"] == 3 * whole["seconds"]
    for name in ("tasks", "generative"):
        for task in (*whole[name].values(), *parts[name].values()):
            del task["seconds"], task["prompt_hash"]
        assert json.dumps(whole[name]) == json.dumps(parts[name])
    (tmp_path / "parts" / "shard-2-of-3" / "tasks.jsonl").write_text("")
    with pytest.raises(ValueError, match="shard-2-of-3: winogrande is not finished"):
        build_results(tmp_path / "parts")


def test_a_baseline_was_asked_what_the_evaluation_was(tmp_path: Path) -> None:
    """In every shard."""
    for index in range(2):
        write_run(tmp_path / f"shard-{index + 1}-of-2", 12, shard=(index, 2))
        write_run(tmp_path / f"shard-{index + 1}-of-2" / "baseline", 12, shard=(index, 2), plain=True)
    assert build_results(tmp_path)["baseline"] == MODEL
    second = tmp_path / "shard-2-of-2" / "baseline"
    content = (second / "plan.json").read_text()
    for change, words in (
        ({"limit": 3}, r"asked with another limit \(3 there\) than this evaluation; evaluate again with --baseline models/mine"),
        ({"model": MODEL | {"weights": "1" * 64}}, "asked with another model than this evaluation"),
    ):
        (second / "plan.json").write_text(json.dumps(json.loads(content) | change))
        with pytest.raises(ValueError, match=f"{second}: {words}"):
            build_results(tmp_path)
    (second / "plan.json").write_text(content)
    (second / "tasks.jsonl").unlink()
    with pytest.raises(ValueError, match=f"{second}: winogrande is not finished; evaluate again with --baseline models/mine"):
        build_results(tmp_path)
    shutil.rmtree(second)
    with pytest.raises(ValueError, match=f"{second}: missing, while .*shard-1-of-2/baseline is there; evaluate again with --baseline"):
        build_results(tmp_path)


def test_runs_are_compared_on_what_both_were_asked(tmp_path: Path) -> None:
    write_run(tmp_path / "one", 20)
    write_run(tmp_path / "other", 12, better=0.25)
    rows = compare_runs([tmp_path / "one", tmp_path / "other"])
    row = next(row for row in rows if row["run"].startswith("other") and (row["benchmark"], row["way"]) == ("piqa", "1 pass"))
    assert row["score"]["count"] == 12 and row["difference"]["count"] == 12
    assert row["mcnemar"]["only_second"] == 3 and row["mcnemar"]["only_first"] == 0


def test_text_of_a_model_is_shown_as_it_is(tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    results = write_results(tmp_path)
    html = page(results, tmp_path, {})
    assert "&lt;soft&gt; `x` | y" in html and "<soft>" not in html
    assert "<soft> `x` | y" in markdown(results)
    assert answer_text({"text": "\n\n  x = 1\n\n"}) == "  x = 1" and answer_text({"text": " \n"}) == "(empty)"
    assert "2 &lt; gsm8k?" in html and "2 < gsm8k?" in markdown(results)


def test_pictures_show_what_there_is(tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    results = write_results(tmp_path)
    assert list(plot_evaluation(results, tmp_path).values()) == ["figure-4.svg", "figure-5.svg", "figure-6.svg"]
    results["generative"], results["mean"] = {}, None
    assert plot_evaluation(results, tmp_path) == {}


def test_an_evaluation_is_not_mixed_with_another(tmp_path: Path) -> None:
    plan = write_run(tmp_path, 3)
    assert check_folder(tmp_path, plan, MODEL)
    with pytest.raises(ValueError, match=r"another model \(weights\); choose another --output"):
        check_folder(tmp_path, plan, MODEL | {"weights": "1" * 64})
    assert not check_folder(tmp_path / "new", plan, MODEL)


def test_results_without_a_plan_that_can_be_read_are_not_taken_over(tmp_path: Path) -> None:
    plan = write_run(tmp_path, 3)
    (tmp_path / "plan.json").write_text("{")
    for ask in (lambda: check_folder(tmp_path, plan, MODEL), lambda: start(tmp_path, plan, MODEL), lambda: build_results(tmp_path)):
        with pytest.raises(
            ValueError, match=r"plan.json: not readable .*; evaluate into another folder \(--output\), or remove this whole"
        ):
            ask()
    (tmp_path / "plan.json").unlink()
    with pytest.raises(ValueError, match=r"has documents.jsonl but no plan.json that names its model; choose another --output, or remove"):
        check_folder(tmp_path, plan, MODEL)


def test_a_plan_that_does_not_say_a_limit_has_none(tmp_path: Path) -> None:
    plan = write_run(tmp_path, 3)
    older = json.loads((tmp_path / "plan.json").read_text())
    del older["limit"]
    (tmp_path / "plan.json").write_text(json.dumps(older))
    assert check_folder(tmp_path, plan, MODEL)
    results = write_results(tmp_path)
    assert results["plan"]["limit"] is None and "--limit" not in markdown(results)
    del results["plan"]["limit"]  # an older results.json
    assert "--limit" not in markdown(results)


def test_scores_as_text() -> None:
    assert score({"value": 0.5, "error": 0.0123}) == "50.0 ± 1.2"
    assert score({"value": 1.0, "error": None}) == score({"value": 1.0, "error": float("nan")}) == "100.0"
    assert score(None) == score({"value": None, "error": None}) == "-"
    assert [task.label for task in TASKS.values()] == ["GSM8K", "MATH-500", "HumanEval", "MBPP"]


def test_chance_is_drawn_where_every_task_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In percent of the axis, as a dotted line that the legend names."""
    write_run(tmp_path, 12)
    results = write_results(tmp_path)
    assert results["mean"]["chance"] is None, "these documents are of a version that did not note it"
    levels: list[Any] = []
    monkeypatch.setattr("fullband.plots.evaluation_page.draw_chance", lambda axes, chance: levels.append(chance))
    with undrawn():
        for chance in (None, 0.375):
            results["mean"]["chance"] = chance
            plot_passes(results, tmp_path / "figure.svg")
        del results["mean"]["chance"]
        plot_passes(results, tmp_path / "figure.svg")
    assert levels == [None, 37.5, None]


def test_pages_scroll_what_is_wide_in_its_own_box(tmp_path: Path) -> None:
    """Tables and pictures in theirs; words without a space, such as hashes and paths, break."""
    write_run(tmp_path, 3)
    results = write_results(tmp_path)
    with undrawn():
        text = page(results, tmp_path, plot_evaluation(results, tmp_path))
    assert text.count("<table>") == text.count('<div class="scroll"><table>') > 0
    assert re.search(r"figure \{[^}]*overflow-x: auto", text) and "max-width: 100%" not in text, (
        "pictures keep their own size: their words stay readable"
    )
    assert re.search(r"[^{}]*\bli\b[^{}]*\{[^}]*overflow-wrap: anywhere", text)


def test_programs_are_asked_for_in_a_fixed_width_face() -> None:
    folder = next(folder for folder in PUBLISHED if folder.name == "smollm2-humaneval")
    text = page(json.loads((folder / "results.json").read_text(encoding="utf-8")), folder, {})
    assert 'class="question code"' in text and 'class="text code"' in text and 'class="question"' not in text
    assert re.search(r"\.question\.code \{ font-family: ui-monospace", text)
