"""Published results: logs once, compressed, unchanged since they were published; outside the source distribution."""

import hashlib
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

from fullband.plots.runs import read_run

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
FILES = sorted(path for path in RESULTS.rglob("*") if path.is_file())
SUMS = [path for path in FILES if path.name == "SHA256SUMS"]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_nothing_is_kept_twice() -> None:
    places = defaultdict(list)
    for path in FILES:
        places[digest(path)].append(path.relative_to(ROOT).as_posix())
    assert [same for same in places.values() if len(same) > 1] == []


def test_logs_are_compressed_and_have_hashes() -> None:
    assert [path for path in FILES if path.suffix in (".jsonl", ".log") or path.name == "cell.json"] == []
    listed = {sums.parent / line.split("  ", 1)[1] for sums in SUMS for line in sums.read_text().splitlines()}
    assert {path for path in FILES if path.suffix == ".gz"} <= listed


@pytest.mark.parametrize("sums", SUMS, ids=lambda path: path.parent.relative_to(RESULTS).as_posix())
def test_hashes(sums: Path) -> None:
    for line in sums.read_text().splitlines():
        expected, name = line.split("  ", 1)
        assert digest(sums.parent / name) == expected, name


def test_a_compressed_log_is_a_run() -> None:
    assert read_run(RESULTS / "s3" / "logs" / "fullband-seed-0").last["step"] + 1 == 700


def test_every_folder_has_a_page() -> None:
    assert [path for path in RESULTS.iterdir() if path.is_dir() and not (path / "README.md").is_file()] == []


def test_results_are_not_in_the_source_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "/results" in project["tool"]["hatch"]["build"]["targets"]["sdist"]["exclude"]
