"""`fullband plot`: every figure of the paper that the sources allow, on a page that works in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cli.commands import fullband, refused
from fullband.plots.gallery import figures_of
from fullband.plots.passes import has_passes, passes_chart
from fullband.plots.picture import draw_chart
from fullband.plots.sources import read_sources
from fullband.plots.style import figure
from plots.test_runs import write_run

HOVER = """<script>
const chart = document.querySelector("#ID svg.desk"), box = chart.getBoundingClientRect();
chart.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + 0.5 * box.width, clientY: box.top + 20}));
document.title = chart.parentNode.querySelector(".tip").textContent;
</script>"""


def depth(number: int, accuracy: float) -> dict[str, Any]:
    return {"depth": number, "accuracy": accuracy, "stderr": 0.01, "moved": 0.5, "by_updates": {"0": accuracy}}


def probe_folder(folder: Path) -> Path:
    folder.mkdir()
    prefills = [{"prefill": name, "depths": [depth(0, low), depth(1, 0.9)]} for name, low in (("standard", 0.5), ("full", 0.97))]
    single = [{"task": task, "setting": task, "prefills": prefills} for task in ("completion", "memory")]
    registers = [
        {"task": "registers", "setting": f"m = {m}, {writes} writes", "registers": m, "writes_each": writes, "prefills": prefills}
        for m, writes in ((1, 16), (2, 8), (4, 4), (8, 2), (8, 4), (8, 8))
    ]
    (folder / "results.json").write_text(json.dumps({"settings": single + registers}), encoding="utf-8")
    return folder


def record(k: int) -> dict[str, Any]:
    change = {"absolute": 1 / k, "relative": 0.5**k, "median": 0.5**k, "p99": 0.6**k} if k > 1 else None
    gaps = {"gap_loss": 0.1, "gap_state_past": 0.1, "gap_kl_past": 0.1}
    return {"k": k, "loss": 2 + 1 / k, "loss_past": 2 + 1 / k, "change": change, "change_front": change, "change_past": change} | gaps


def diagnosis_folder(folder: Path, passes: int) -> Path:
    folder.mkdir()
    trace = {"rows": 4, "length": 64, "horizon": 32, "records": [record(k) for k in range(1, min(passes, 40) + 1)]}
    trace |= {"loss_exact": 2.0, "loss_exact_past": 2.0}
    grid = {"mode": "soft", "layers": [0, 1, 2], "prompt": 2, "unexpected": 0, "influence": [[[0.1, 0.0, 0.5]] * 5] * 3}
    found = {
        "verdict": "contracting",
        "model": "m",
        "settings": {"passes": passes},
        "trace": trace,
        "reach": [grid | {"mode": "standard"}, grid],
    }
    (folder / "diagnosis.json").write_text(json.dumps(found), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("sources")
    run = write_run(folder / "fed", [1, 2, 2, 3], {3: {"0": 2.2, "1": 2.1, "2": 2.05, "exact": 2.0}}, crossover=3)
    plain = write_run(folder / "plain", [1] * 6, {5: {"0": 2.3}})
    return [run, plain, diagnosis_folder(folder / "text", 32), diagnosis_folder(folder / "long", 1000), probe_folder(folder / "probe")]


@pytest.fixture(scope="module")
def drawn(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("figures")
    done = fullband("plot", *folders, "-o", output, "--json")
    assert done.code == 0, done.err
    assert done.json["figures"] == [
        *("figure-1-text", "figure-1-long", "figure-3-text", "figure-4-left"),
        *("figure-7a-probe", "figure-7b-probe", "figure-10-long", "learning-curves-fed", "learning-curves-plain"),
    ]
    return output


def test_every_figure_is_png_and_svg(drawn: Path) -> None:
    from matplotlib.image import imread

    pictures = sorted(drawn.glob("*.png"))
    assert len(pictures) == 9
    for picture in pictures:
        assert imread(picture).shape[1] > 1000 and imread(picture).std() > 0.01
        assert picture.with_suffix(".svg").read_text(encoding="utf-8").rstrip().endswith("</svg>")


def test_the_page_loads_nothing_and_says_what_is_marked(drawn: Path) -> None:
    text = (drawn / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|src=|<link|url\((?!#)|\$\w", text)
    assert "feedback on, shock +0.25 nats" in text and "crossover" in text and "Verdict: contracting" in text


@pytest.mark.parametrize(
    ("figure", "said"),
    [
        ("figure-4-left", ["feedback passes: 1", "fed", "2.100", "fed, exact", "2.000"]),
        ("figure-3-text", ["pass ", "whole sequences"]),
        ("figure-7a-probe", ["depth ", "standard prefill", "0.500", "full recurrence", "0.970"]),
        ("learning-curves-fed", ["million", "full-band, pass 1 (without feedback)", "full-band, pass 2"]),
    ],
)
def test_the_page_answers_the_pointer_in_a_browser(drawn: Path, figure: str, said: list[str], tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on this machine")
    text = (drawn / "index.html").read_text(encoding="utf-8")
    (tmp_path / "page.html").write_text(text.replace("</body>", HOVER.replace("ID", figure) + "</body>"), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile", "--window-size=1000,900", "--dump-dom"]
    done = subprocess.run([chromium, *options, (tmp_path / "page.html").as_uri()], capture_output=True, text=True, timeout=120)
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title, done.stderr[-500:]
    assert all(words in title[1] for words in said), title[1]


def test_the_lines_of_figure_4_are_the_last_evaluation(folders: list[Path]) -> None:
    (run,) = [run for run in read_sources(folders[:2]).runs if has_passes(run)]
    found = [(line.label, line.x, line.y) for line in passes_chart([run]).lines]
    assert found == [("fed", [0, 1, 2], [2.2, 2.1, 2.05]), ("fed, exact", [0, 1, 2], [2.0] * 3)]


def test_a_settling_picture_of_many_passes_is_figure_10(folders: list[Path]) -> None:
    names = [figure.name for figure in figures_of(read_sources(folders[2:4]))]
    assert names == ["figure-1-text", "figure-1-long", "figure-3-text", "figure-10-long"]


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    assert "nothing to draw; name a run folder (metrics.jsonl)" in refused("plot", tmp_path)
    (tmp_path / "diagnosis.json").write_text("{}")
    said = refused("plot", tmp_path)
    assert "diagnosis.json: not as diagnose or probe writes it: verdict: required, but not given" in said
    (tmp_path / "diagnosis.json").write_text("{")
    assert "not readable as JSON" in refused("plot", tmp_path)
    (tmp_path / "diagnosis.json").unlink()
    (tmp_path / "results.json").write_text('{"settings": []}')  # a probe that was interrupted before its first setting
    assert "nothing to draw" in refused("plot", tmp_path, "-o", tmp_path / "figures")
    assert not (tmp_path / "figures").exists()


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("trace", "records"), None, "trace.records: required, but not given"),
        (("trace", "records"), [], "trace.records: must have at least 1 item"),
        (("trace", "horizon"), "far", "trace.horizon: must be a whole number, got 'far'"),
        (("reach",), [{}], "reach.0.mode: required, but not given"),
    ],
)
def test_a_damaged_diagnosis_is_named(folders: list[Path], tmp_path: Path, place: tuple[str, ...], value: Any, said: str) -> None:
    found = json.loads((folders[2] / "diagnosis.json").read_text())
    part = found
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    if value is None:
        del part[place[-1]]
    (tmp_path / "diagnosis.json").write_text(json.dumps(found))
    line = refused("plot", tmp_path)
    assert str(tmp_path / "diagnosis.json") in line and said in line


def test_a_diagnosis_without_finite_numbers_is_drawn(folders: list[Path], tmp_path: Path) -> None:
    """diagnose writes null for what is infinite: here all losses, changes and influences."""

    def emptied(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: emptied(part) for key, part in value.items()}
        return [emptied(part) for part in value] if isinstance(value, list) else None if isinstance(value, float) else value

    found = emptied(json.loads((folders[2] / "diagnosis.json").read_text()))
    assert found["trace"]["records"][3]["loss"] is None and found["reach"][0]["influence"][0][0][0] is None
    (tmp_path / "diagnosis.json").write_text(json.dumps(found))
    done = fullband("plot", tmp_path, "-o", tmp_path / "figures")
    assert done.code == 0, done.err
    assert "Loss by pass: no finite value." in (tmp_path / "figures" / "index.html").read_text()


def many_runs(folder: Path, count: int) -> list[Path]:
    return [write_run(folder / f"run-{n}", [1, 2], {1: {"0": 2.0 + n, "1": 1.9 + n, "exact": 1.8 + n}}) for n in range(count)]


def test_runs_in_figure_4_look_different(tmp_path: Path) -> None:
    """On the page as in the picture: a colour and a marker for each run; dashes say which are exact."""
    chart = passes_chart(read_sources(many_runs(tmp_path, 8)).runs)
    looks = re.findall(r'<svg class="swatch".*?<path class="([^"]*)"[^>]*?(stroke-dasharray="[^"]*")?/>(<polygon.*?>)</svg>', chart.html())
    assert len(looks) == len(set(looks)) == 16
    assert [key for key, _, _ in looks] == [f"run-{n}" for n in range(1, 9) for _ in range(2)]
    assert [bool(dash) for _, dash, _ in looks] == [False, True] * 8
    with figure([]) as (_, axes):
        draw_chart(axes, chart)
        drawn = [(line.get_color(), line.get_marker(), line.get_linestyle()) for line in axes.lines]
    assert [len({style[part] for style in drawn}) for part in range(3)] == [8, 8, 2] and len(set(drawn)) == 16


def test_more_runs_than_can_be_told_apart_are_two_figures(tmp_path: Path) -> None:
    figures = figures_of(read_sources(many_runs(tmp_path, 10)))[:2]
    assert [figure.name for figure in figures] == ["figure-4-left", "figure-4-left-2"]
    assert figures[1].title.endswith("runs 9 to 10 of 10") and "run-9, exact" in figures[1].html and "run-7" not in figures[1].html


def test_no_line_of_a_mark_is_drawn_over_a_label(drawn: Path) -> None:
    text = (drawn / "index.html").read_text(encoding="utf-8")
    assert text.count('class="note"') > 4
    for chart in re.findall(r"<svg class=\"(?:desk|phone)\".*?</svg>", text, re.DOTALL):
        marks, notes = (chart.rfind('class="mark'), chart.find('class="note"'))
        assert notes == -1 or marks < notes


def test_two_folders_of_one_name(folders: list[Path], tmp_path: Path) -> None:
    """The figures of one would take the place of the other's."""
    for folder in (folders[0], folders[2]):
        twin = tmp_path / folder.name
        shutil.copytree(folder, twin)
        assert f"another folder is called '{folder.name}' too" in refused("plot", folder, twin, "-o", tmp_path / "figures")
    assert len(read_sources([folders[0], folders[0]]).runs) == 1
