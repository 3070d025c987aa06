"""What a record is read as: a field, or a pattern of several; and rows of one document each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fullband.config import DataConfig, FilesSource
from fullband.data import IGNORE, build_loader
from fullband.data.files import Files
from fullband.data.records import TextRecords


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"question": f"q{i}?", "answer": "a" * i}) + "\n" for i in range(30)), encoding="utf-8")
    return path


def test_a_pattern_of_fields(questions: Path, tmp_path: Path) -> None:
    source = Files(FilesSource(paths=[str(questions)], validation_fraction=0, text_field="{question}\n{answer}"))
    assert [text for _, text in source.documents("train")][:3] == ["q0?\n", "q1?\na", "q2?\naa"]
    assert source.fingerprint() != Files(FilesSource(paths=[str(questions)], validation_fraction=0, text_field="question")).fingerprint()
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"answer": ["yes", None, "no"], "question": ["a", "b", "c"], "other": [1, 2, 3]})
    parquet.write_table(table, tmp_path / "questions.parquet")
    source = Files(FilesSource(paths=[str(tmp_path / "questions.parquet")], validation_fraction=0, text_field="{question}: {answer}"))
    assert [(cursor, text) for cursor, text in source.documents("train")] == [((0, 0), "a: yes"), ((0, 2), "c: no")]


def test_bad_patterns_and_fields_are_named(questions: Path) -> None:
    with pytest.raises(ValueError, match=r"data.source.text_field: '\{question' is not a pattern of fields"):
        TextRecords("{question")
    missing = Files(FilesSource(paths=[str(questions)], validation_fraction=0, text_field="{question} {reply}"))
    with pytest.raises(ValueError, match=r"questions.jsonl:1: no field 'reply'; the fields there are question, answer"):
        next(missing.documents("train"))


@pytest.mark.parametrize("field", ["{q:{w}}", "{q!r}", "{q} {}", "{q:>10}"])
def test_a_pattern_names_fields_and_nothing_else(field: str) -> None:
    with pytest.raises(ValueError, match=r"is not a pattern of fields \(braces must hold the name of a field alone\)"):
        TextRecords(field)


def test_fields_with_dots_and_brackets(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"a.b": "x", "c[0]": "y"}) + "\n")
    source = Files(FilesSource(paths=str(tmp_path / "a.jsonl"), validation_fraction=0, text_field="{a.b}-{c[0]}-{{}}"))
    assert [text for _, text in source.documents("train")] == ["x-y-{}"]


MESSAGES = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
SHAREGPT = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]


@pytest.mark.parametrize(("field", "turns"), [("messages", MESSAGES), ("conversations", SHAREGPT), ("dialogue", MESSAGES)])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_hint_for_conversations_leads_to_training_on_them(tmp_path: Path, field: str, turns: list[dict[str, str]], kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps({field: turns}) + "\n" for _ in range(2)))
    elif field == "dialogue":
        pytest.skip("a table's check sees names only")
    else:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.table({field: [turns] * 2}), path)
    source: dict[str, object] = {"kind": "files", "paths": str(path)}
    for text_field in ("text", field):
        with pytest.raises(ValueError) as refused:
            build_loader(DataConfig.model_validate({"source": source | {"text_field": text_field}, "length": 300}), 0, 2).next_batch()
        assert f"'{field}' holds conversations: set data.source.kind=chat" in str(refused.value)
        assert ("messages_field" in str(refused.value)) == (field != "messages")
    source["kind"] = "chat"
    if field != "messages":
        with pytest.raises(ValueError, match=rf"no field 'messages'; .* \(set data.source.messages_field={field}\)"):
            build_loader(DataConfig.model_validate({"source": source, "length": 300}), 0, 2).next_batch()
        source["messages_field"] = field
    loader = build_loader(DataConfig.model_validate({"source": source, "length": 300}), 0, 2)
    assert "2+2?" in loader.tokenizer.decode(loader.next_batch().tokens[0].tolist())
    assert loader.validation_batches(4, 4)[0].shape[0], "one of two conversations is held out, whole"
    assert loader.notices()[0].startswith(f"{path}: too few documents to hold out a whole one")


def test_one_small_file_can_be_trained_on(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("A small file of a few lines.\n" * 9)
    loader = build_loader(
        DataConfig.model_validate({"source": {"kind": "files", "paths": str(tmp_path / "notes.txt")}, "length": 32}), 0, 4
    )
    assert loader.next_batch().shape == (4, 32) and len(loader.validation_documents(5)) == 1
    assert loader.notices() == [
        f"{tmp_path / 'notes.txt'}: too few documents to hold out a whole one, so the end of the text is held out: 87 of 261 characters"
    ]


def test_rows_of_one_document(questions: Path) -> None:
    """A document that is longer than a row goes on in the next; its last target there is still the true next token."""
    data = {"source": {"kind": "files", "paths": [str(questions)], "validation_fraction": 0.2, "text_field": "answer"}}
    loader = build_loader(DataConfig.model_validate(data | {"length": 8, "packing": False, "shuffle_documents": 4}), 0, 3)
    states, batches = [], []
    for _ in range(25):
        states.append(loader.state_dict())
        batches.append(loader.next_batch())
    for batch in (*batches, *loader.validation_batches(99, 99)):
        held = batch.documents >= 0
        assert (batch.documents[held] == 0).all() and torch.equal(held.long().cumsum(1)[held] - 1, batch.positions[held])
        assert (held.long().diff(dim=1) <= 0).all(), "padding stands on the right"
        end = batch.tokens == 256
        assert torch.equal(batch.targets[held & ~end] != IGNORE, torch.ones(int((held & ~end).sum()), dtype=torch.bool))
        assert (batch.targets[~held] == IGNORE).all() and (batch.targets[held & end] == IGNORE).all()
    assert any((batch.documents < 0).any() for batch in batches) and any((batch.documents[:, -1] == 0).any() for batch in batches)
    loader.load_state_dict(states[7])
    assert torch.equal(loader.next_batch().tokens, batches[7].tokens)
