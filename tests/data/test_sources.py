"""The standard library and Hugging Face datasets as text sources."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fullband.config import DataConfig, HuggingFaceSource, PythonStdlibSource
from fullband.data import build_loader
from fullband.data.huggingface import HuggingFace
from fullband.data.python_stdlib import PythonStdlib


def test_the_standard_library_is_sorted_text_without_tests() -> None:
    source = PythonStdlib(PythonStdlibSource())
    names = [file.relative_to(source.root).as_posix() for file in source.files]
    assert names == sorted(names) and "abc.py" in names and "asyncio/tasks.py" in names
    assert not [name for name in names if set(name.split("/")[:-1]) & {"test", "tests", "site-packages", "encodings"}]
    (cursor, text) = next(source.documents("train", (names.index("abc.py"), 0)))
    assert cursor[0] >= names.index("abc.py") and text.strip()


def test_the_splits_of_the_standard_library_share_nothing() -> None:
    source = PythonStdlib(PythonStdlibSource())
    training, held_out = ([cursor for cursor, _ in source.documents(split)] for split in ("train", "validation"))
    assert not set(training) & set(held_out) and 5 < len(held_out) < len(training) / 5


def test_files_that_are_not_utf8_are_left_out_and_no_files_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "pkg" / "tests").mkdir(parents=True)
    for name, content in {"b.py": b"b = 1", "a.py": b"# caf\xe9", "pkg/c.py": b"c = 1", "pkg/tests/d.py": b"d", "pkg/e.py": b"\n"}.items():
        (tmp_path / name).write_bytes(content)
    source = PythonStdlib(PythonStdlibSource(validation_fraction=0), tmp_path)
    assert [text for _, text in source.documents("train")] == ["b = 1", "c = 1"]
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"^python-stdlib \(.*none\): no \.py files there; this interpreter hides its library, use local "):
        PythonStdlib(PythonStdlibSource(), tmp_path / "none")


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("datasets")
    folder = tmp_path / "dataset"
    folder.mkdir()
    for split, rows in (("train", 30), ("test", 5)):
        lines = [json.dumps({"body": f"{split} {i}" if i else None, "id": i}) + "\n" for i in range(rows)]
        (folder / f"{split}.jsonl").write_text("".join(lines))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return folder


def texts(dataset: Path, of: str = "train", start: tuple[int, int] = (0, 0), **options: Any) -> list[str]:
    source = HuggingFace(HuggingFaceSource(dataset=str(dataset), **({"text_field": "body"} | options)))
    return [text for _, text in source.documents(of, start)]


def test_a_local_dataset_is_streamed(dataset: Path) -> None:
    everything = [f"train {i}" for i in range(1, 30)]  # row 0 has no text
    assert texts(dataset, "validation", validation_documents=4) == everything[:3]
    assert texts(dataset, validation_documents=4) == everything[3:]
    assert texts(dataset, start=(0, 20), validation_documents=4) == everything[19:]
    assert texts(dataset, validation_split="test") == everything
    assert texts(dataset, "validation", validation_split="test") == [f"test {i}" for i in range(1, 5)]


def test_a_saved_dataset_is_read(dataset: Path, tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"body": ["a", "b", "c"]})
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "dict"))
    for name in ("one", "dict"):
        assert texts(tmp_path / name, validation_documents=1) == ["b", "c"]
        assert texts(tmp_path / name, "validation", validation_documents=9) == ["a", "b", "c"]


def test_bad_datasets_are_refused_in_one_line(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(folder: Path, **options: Any) -> str:
        with pytest.raises(ValueError) as caught:
            texts(folder, **options)
        assert "\n" not in str(caught.value)
        return str(caught.value).replace(str(tmp_path), "DIR")

    assert refusal(tmp_path / "absent").startswith("dataset DIR/absent, split train: cannot be opened (")
    message = refusal(dataset, split="dev")
    assert message.startswith("dataset DIR/dataset, split dev: cannot be opened (") and "train" in message
    where = "dataset DIR/dataset, split train, row 3"
    hint = "(set data.source.text_field)"
    assert refusal(dataset, text_field="text", validation_documents=3) == f"{where}: no field 'text'; the fields there are body, id {hint}"
    assert refusal(dataset, text_field="id", validation_documents=3) == f"{where}: the field 'id' must be text, got int {hint}"
    (dataset / "train.jsonl").write_text('{"body": "a"}\n{"body": \n')
    assert refusal(dataset, validation_documents=1).startswith("dataset DIR/dataset: reading stopped (")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert refusal(dataset) == "data.source.kind huggingface needs the package datasets: pip install 'fullband[data]'"


def test_everything_held_out_is_an_error(dataset: Path) -> None:
    config = DataConfig(source=HuggingFaceSource(dataset=str(dataset), text_field="body", validation_documents=30), length=8)
    with pytest.raises(ValueError, match=r"no training documents in it; change data\.source\.validation_documents, or name a"):
        build_loader(config, 0, 2).next_batch()
