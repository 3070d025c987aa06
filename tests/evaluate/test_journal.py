"""Journals keep what is finished, whatever happens to the process."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fullband.evaluate.evaluation import Journals
from fullband.evaluate.journal import Journal


def test_what_was_added_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.add({"a": 1, "b": {"c": "é"}})
    journal.add([("a", 2)])
    again = Journal(path)
    assert dict(again.items()) == {"a": 2, "b": {"c": "é"}}
    assert "a" in again and "z" not in again and again.get("z") is None and again["a"] == 2


def test_a_line_cut_off_is_dropped_and_damage_elsewhere_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'["a", 1]\n["b", 2')
    assert dict(Journal(path).items()) == {"a": 1}
    Journal(path).add({"b": 3})
    assert dict(Journal(path).items()) == {"a": 1, "b": 3}
    for line in (b"nonsense", b'"ab"', b"[1, 2]", b'["a"]', b"{}", b"\xff\xfe"):
        path.write_bytes(b'["a", 1]\n' + line + b'\n["b", 3]\n')
        with pytest.raises(ValueError, match=r"journal\.jsonl:2: damaged"):
            Journal(path)


def test_reading_changes_nothing(tmp_path: Path) -> None:
    """Another process may be in the middle of writing the last line."""
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'["a", 1]\n["b", 2')
    assert len(Journal(path)) == 1 and path.read_bytes() == b'["a", 1]\n["b", 2'


def test_a_full_disk_names_the_file_and_loses_nothing(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.add({"a": "x" * 1000})
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, limits[1]))
    try:
        with pytest.raises(OSError, match=r"journal\.jsonl"):
            journal.add({"b": "y" * 1000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.stat().st_size == 1500
    assert list(dict(Journal(path).items())) == ["a"]
    Journal(path).add({"b": "y"})
    assert dict(Journal(path).items()) == {"a": "x" * 1000, "b": "y"}


def test_a_kill_loses_nothing_that_was_added(tmp_path: Path, killed_while: Callable[[Callable[[int], None]], Iterator[None]]) -> None:
    path = tmp_path / "journal.jsonl"
    for _ in killed_while(lambda i: Journal(path).add({f"{len(Journal(path))}": "x" * 5000})):
        kept = dict(Journal(path).items())
        assert list(kept) == [str(number) for number in range(len(kept))]
        assert len(kept) >= 1


SCORES = {"0": [-1.5, True], "exact": [-1, False]}
DOCUMENT = {"task": "piqa", "document": 3, "prompt_hash": "ab", "scores": {"0": {"acc": 1.0}}}
ROLLOUTS = {"question": "q", "cut": 0, "rollouts": [{"text": "4", "tokens": 2, "finish": "stop"}]}
GRADES = {"verdicts": ["right"], "details": [None]}
TASK = {"kind": "task", "documents": 3, "metric": "acc", "shots": None, "data_hash": "a", "prompt_hash": ["b"], "seconds": 1.5}
GENERATIVE = {"kind": "generative", "problems": [0, 1], "data_hash": "a", "prompt_hash": ["b"], "seconds": 2}


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("scores", SCORES, [5, [], {"0": -1.5}, {"0": [-1.5]}, {"0": ["x", True]}, {"0": None}]),
        ("documents", DOCUMENT, [5, "x", {}, DOCUMENT | {"scores": []}, DOCUMENT | {"scores": {"0": 1.0}}, DOCUMENT | {"document": None}]),
        (
            "rollouts",
            ROLLOUTS,
            [None, [], {"rollouts": []}, ROLLOUTS | {"rollouts": ["4"]}, ROLLOUTS | {"rollouts": {}}, ROLLOUTS | {"cut": "x"}],
        ),
        ("grades", GRADES, [{}, [], GRADES | {"verdicts": "right"}, GRADES | {"verdicts": [True]}]),
        ("tasks", TASK, ["x", {}, {"kind": "other"}, TASK | {"seconds": "long"}, {"kind": "task"}, TASK | {"prompt_hash": "b"}]),
        ("tasks", GENERATIVE, [{"kind": "generative"}, GENERATIVE | {"problems": 3}]),
    ],
)
def test_a_record_of_another_shape_is_damage(tmp_path: Path, name: str, good: object, bad: list[object]) -> None:
    path = tmp_path / f"{name}.jsonl"
    Journal(path).add({"key": good})
    assert Journals.open(tmp_path).__dict__[name].get("key") == good
    for record in bad:
        path.unlink()
        Journal(path).add({"key": good, "other": record})
        with pytest.raises(ValueError, match=rf"{name}\.jsonl:2: damaged; remove the line, and what it held is computed again"):
            Journals.open(tmp_path)
    path.write_text('["key", ' + "[" * 100_000 + "]" * 100_000 + "]\n")
    with pytest.raises(ValueError, match=rf"{name}\.jsonl:1: damaged"):
        Journals.open(tmp_path)


def test_half_a_surrogate_pair_is_kept(tmp_path):
    """A solution's exception may hold one, and must not end the evaluation."""
    Journal(tmp_path / "x.jsonl").add({"a": ["\ud800 ü", 1]})
    assert Journal(tmp_path / "x.jsonl")["a"] == ["\ud800 ü", 1]
    assert "ü" in (tmp_path / "x.jsonl").read_text(encoding="utf-8")


def test_a_flipped_bit_inside_a_text_is_found(tmp_path):
    path = tmp_path / "x.jsonl"
    Journal(path).add({"a": {"text": "the answer is 18", "n": 0.1}, "b": {"text": "ü", "n": 1}})
    content = path.read_bytes()
    assert Journal(path)["b"] == {"text": "ü", "n": 1}
    path.write_bytes(content.replace(b"is 18", b"is 19"))
    with pytest.raises(ValueError, match=r"x\.jsonl:1: damaged"):
        Journal(path)
    path.write_text('["a", {"text": "of an older version"}]\n')
    assert Journal(path)["a"] == {"text": "of an older version"}
