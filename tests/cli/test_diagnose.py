"""`fullband diagnose`: verdict, tables, JSON, figures and page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from cli.commands import Trained, fullband, refused

VERDICTS = {"contracting", "wavefront-limited", "oscillating", "diverging", "not yet trained", "not measurable at this length"}
SHORT = ("--rows", "3", "--passes", "9", "--rollout", "60")


def test_as_json(task_run: Trained) -> None:
    done = fullband("diagnose", task_run.folder, *SHORT, "--json")
    assert done.code == 0, done.err
    found = done.json
    assert found["verdict"] in VERDICTS and found["why"] and found["data"] == "held-out examples of running products in S3"
    assert [record["k"] for record in found["trace"]["records"]] == list(range(1, 10))
    assert found["trace"]["length"] == 48 and found["trace"]["horizon"] == 9
    assert [rollout["temperature"] for rollout in found["rollouts"]] == [0, 1]
    assert all(rollout["restarts"] for rollout in found["rollouts"]), "the context of 48 is shorter than 32 + 60"
    assert sum(reach["unexpected"] for reach in found["reach"]) == 0
    assert set(found["trace"]["passes_needed"]) == {"0.1", "0.01", "0.001"}
    begun = ["evaluating in passes", "generating, greedy", "generating, sampled", "following a nudge", "asking what states can reach"]
    assert done.err.splitlines() == begun, "without a terminal, a line when something begins"


def test_in_words(text_run: Trained) -> None:
    done = fullband("diagnose", text_run.folder, *SHORT, "--length", "20")
    assert done.code == 0, done.err
    assert done.out.startswith("Verdict: ")
    said = " ".join(done.out.split())
    for words in (
        "Repeated passes over",
        "Passes needed until 99% of the states move less than 0.1:",
        "Greedy (soft",
        "Sampled (soft",
        "A perturbation of 0.02",
        "as Eqs. 2 and 7 say",
    ):
        assert words in said


class Loads(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]


@pytest.mark.drawn
def test_figures_and_page(task_run: Trained, tmp_path: Path) -> None:
    from matplotlib.image import imread

    folder = tmp_path / "new" / "out"
    assert fullband("diagnose", task_run.folder, *SHORT, "--output", folder).code == 0
    names = {"settling", "arrival", "reachability", "rollouts", "response"}
    assert {path.name for path in folder.iterdir()} == {f"{n}.{kind}" for n in names for kind in ("png", "svg")} | {
        "diagnosis.json",
        "report.html",
    }
    assert all(imread(folder / f"{name}.png").shape[1] > 1000 for name in names)
    written = json.loads((folder / "diagnosis.json").read_text())
    assert written["verdict"] in VERDICTS
    page = (folder / "report.html").read_text(encoding="utf-8")
    parser = Loads()
    parser.feed(page)
    assert parser.loads == [], "the page opens offline"
    assert page.count("data-chart=") == 2 * 6 and "$" not in re.sub(r"<script>.*</script>", "", page, flags=re.S)
    assert page.count("<circle") == 2 * (3 * 6 - 1), "two grids of 3 layers and 6 positions, without the state above the one asked about"


def test_the_page_of_what_was_not_measured(text_run: Trained, tmp_path: Path) -> None:
    done = fullband("diagnose", text_run.folder, "--rows", "2", "--passes", "4", "--length", "5", "--rollout", "0", "--output", tmp_path)
    assert done.code == 0, done.err
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "None were asked for" in page and "rows of 5 positions are too short" in page
    assert not (tmp_path / "rollouts.png").exists() and not (tmp_path / "reachability.png").exists()


def test_a_response_that_is_not_finite_has_a_report(task_run: Trained, tmp_path: Path) -> None:
    done = fullband("diagnose", task_run.folder, *SHORT, "--sigma", "1e40", "--output", tmp_path)
    assert done.code == 0, done.err
    assert "A perturbation of 1e+40 of a state's norm grows x – per position" in done.out
    assert json.loads((tmp_path / "diagnosis.json").read_text())["perturbation"]["along_positions"]["distance"][0] is None
    assert (tmp_path / "report.html").is_file() and (tmp_path / "response.png").is_file()
    assert fullband("plot", tmp_path, "-o", tmp_path / "figures").code == 0


def test_task_by_name(task_run: Trained) -> None:
    assert fullband("diagnose", task_run.folder, *SHORT, "--task", "S3", "--length", "40", "--json").json["trace"]["length"] == 40
    assert "was not trained on the task" in refused("diagnose", task_run.folder, "--task", "A5")
    assert "modulus" in refused("diagnose", task_run.folder, "--task", "modular-x")
    assert "group: must be one of S3, S4, S5, A4, A5 and Z2 to Z1000, got 'sudoku'" in refused(
        "diagnose", task_run.folder, "--task", "sudoku"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--text", "a.txt", "--task", "S3"), "give only one of them"),
        (("--length", "1000"), "do not fit the model's context of 48"),
        (("--tolerance", "0"), "above 0"),
        (("--sigma", "nan"), "above 0"),
        (("--temperature", "nan"), "above 0"),
        (("--temperature", "inf"), "above 0"),
        (("--output", f"{__file__}/report"), "can't be written"),
        (("--text", "nowhere.txt"), "nowhere.txt"),
        (("--text", ""), "--text: the name of a file must not be empty"),
        (("--rollout", "1"), "a rollout must have at least 2 tokens (the last one is not run), got 1"),
    ],
)
def test_bad_input(task_run: Trained, options: tuple[str, ...], words: str) -> None:
    assert words in refused("diagnose", task_run.folder, *options)


def test_a_file_without_the_field(text_run: Trained, tmp_path: Path) -> None:
    """The hint is one for this command: it has no setting data.source.text_field."""
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    assert "(set data.source.text_field in a recipe, and give it as --recipe instead)" in refused(
        "diagnose", text_run.folder, "--text", tmp_path / "a.jsonl"
    )


def test_a_seed_too_large_names_the_option(task_run: Trained) -> None:
    done = fullband("diagnose", task_run.folder, "--seed", str(2**32))
    assert done.code == 2 and "--seed" in done.err and "4294967295" in done.err


def test_what_two_passes_cannot_show_is_a_dash(task_run: Trained) -> None:
    done = fullband("diagnose", task_run.folder, "--passes", "3", "--rows", "1", "--length", "4", "--rollout", "2")
    assert done.code == 0 and "Change ratio per pass: median –, 99th percentile –, – at the end" in " ".join(done.out.split()), done.out
