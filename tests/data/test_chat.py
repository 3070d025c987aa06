"""Conversations: one document an answer, loss on it alone, prompts plain; packing, state, held-out rows, and what is wrong with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fullband.config import DataConfig
from fullband.data import IGNORE, PADDING, build_loader
from fullband.data.chat import Answer, ChatEncoder
from fullband.data.chat_loader import ChatLoader
from fullband.data.chat_template import CHATML, TEMPLATE_FILE, ChatTemplate
from fullband.data.tokenizers import ByteTokenizer

PLAIN = ChatTemplate(
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def encoder(template: ChatTemplate = PLAIN, length: int = 512) -> ChatEncoder:
    return ChatEncoder(ByteTokenizer(), template, length)


def text(ids: Any) -> str:
    return "".join(chr(i) if i < 256 else "$" for i in ids)


def test_every_answer_is_a_document_that_ends_with_it() -> None:
    first, second = encoder().answers(turns("hi", "yes", "and", "no"))
    assert text(first.tokens) == "u:hi\na:yes\n$" and first.prompt == len("u:hi\na:")
    assert text(second.tokens) == "u:hi\na:yes\nu:and\na:no\n$" and second.prompt == len("u:hi\na:yes\nu:and\na:")
    scored = [(text([a]), text([b])) for a, b in zip(second.tokens, second.targets, strict=True) if b != IGNORE]
    assert scored == [(":", "n"), ("n", "o"), ("o", "\n"), ("\n", "$")]  # the earlier answer is part of the prompt
    assert text(second.tokens[~second.plain]) == "no\n$"


def test_an_answer_ends_where_the_turn_does() -> None:
    """ChatML spelled out in bytes: the answer ends with <|im_end|>, not with the line break behind it."""
    (answer,) = encoder(ChatTemplate(CHATML)).answers(turns("hi", "yes"))
    assert text(answer.tokens[answer.prompt :]) == "yes<|im_end|>"


def test_conversations_that_do_not_fit_are_left_out() -> None:
    messages = turns("hi", "yes", "and", "no")
    assert [len(encoder(length=n).answers(messages)) for n in (11, 12, 22, 23)] == [0, 1, 1, 2]
    assert encoder().answers([{"role": "assistant", "content": "hello"}, *turns("hi", "yes")])[0].prompt > 8  # an opening has no prompt


def test_answers_that_rows_cannot_hold_are_counted(chat_file: Path) -> None:
    assert loader_of(chat_file, length=512).notices() == []
    held_out = chat_file.with_name("held-out.jsonl")
    held_out.write_text(chat_file.read_text())
    loader = loader_of(chat_file, length=30, validation_fraction=0.0, validation_paths=[str(held_out)])
    lengths = [len(answer) for line in chat_file.read_text().splitlines() for answer in encoder().answers(json.loads(line)["messages"])]
    notice, of_held_out = loader.notices()
    assert of_held_out == notice.replace("40 conversations", "40 held-out conversations")
    assert notice.startswith(f"{sum(n > 30 for n in lengths)} of {len(lengths)} answers in the first 40 conversations are left out")
    assert notice.endswith(f"the longest takes {max(lengths)}")


def test_a_template_that_rewrites_its_prompt_is_refused() -> None:
    thinking = ChatTemplate(PLAIN.source.replace("}a:{%", "}a:<think>{%"))
    with pytest.raises(ValueError, match="does not put an answer after its own generation prompt"):
        encoder(thinking).answers(turns("hi", "yes"))


@pytest.fixture
def chat_file(tmp_path: Path) -> Path:
    path = tmp_path / "chat.jsonl"
    rows = [{"messages": turns(*(f"{i}{'ab'[j % 2] * (i * j % 11 + 1)}" for j in range(2 + 2 * (i % 3))))} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "plain.jinja").write_text(PLAIN.source, encoding="utf-8")
    return path


def loader_of(path: Path, batch_rows: int = 3, seed: int = 0, length: int = 64, packing: bool = True, **source: Any) -> ChatLoader:
    options = {"kind": "chat", "paths": [str(path)], "validation_fraction": 0.2, "template": str(path.parent / "plain.jinja")}
    data = {"source": options | source, "length": length, "shuffle_documents": 8, "packing": packing}
    loader = build_loader(DataConfig.model_validate(data), seed, batch_rows)
    assert isinstance(loader, ChatLoader)
    return loader


def documents_of(loader: ChatLoader, batches: int) -> list[tuple[str, str]]:
    """(prompt, answer) of every document of the next batches, whose masks and targets are checked on the way."""
    found = []
    for _ in range(batches):
        batch = loader.next_batch().validate(loader.vocab_size)
        assert batch.plain is not None
        for row in range(batch.shape[0]):
            for number in batch.documents[row].unique():
                at = batch.documents[row] == number
                tokens, targets, plain = batch.tokens[row, at], batch.targets[row, at], batch.plain[row, at]
                if number == PADDING:
                    assert plain.all() and (targets == IGNORE).all() and not tokens.any()
                    continue
                prompt = int(plain.sum())
                assert torch.equal(batch.positions[row, at], torch.arange(len(tokens))) and plain[:prompt].all()
                assert torch.equal(targets != IGNORE, torch.arange(len(tokens)).add(1).ge(prompt) & (tokens != 256))
                assert torch.equal(targets[prompt - 1 : -1], tokens[prompt:])
                found.append((text(tokens[:prompt].tolist()), text(tokens[prompt:].tolist())))
    return found


def test_rows_hold_whole_answers(chat_file: Path) -> None:
    loader = loader_of(chat_file)
    found = documents_of(loader, 12)
    assert all(prompt.startswith("u:") and prompt.endswith("a:") and answer.endswith("\n$") for prompt, answer in found)
    assert len(found) > 12 * 3 + 10, "several to a row"
    assert found[:20] == documents_of(loader_of(chat_file), 12)[:20] != documents_of(loader_of(chat_file, seed=1), 12)[:20]
    alone = loader_of(chat_file, packing=False)
    batches = [alone.next_batch() for _ in range(4)]
    assert all((batch.documents.amax(dim=1) == 0).all() for batch in batches)
    assert documents_of(loader_of(chat_file, packing=False), 4) == found[:12]


def test_the_state_is_exact(chat_file: Path) -> None:
    loader = loader_of(chat_file)
    states, batches = [], []
    while loader.state_dict()["epoch"] < 2:
        states.append(json.loads(json.dumps(loader.state_dict())))
        batches.append(loader.next_batch())
    assert any(state["offset"] for state in states)
    for state, batch in zip(states, batches, strict=True):
        resumed = loader_of(chat_file)
        resumed.load_state_dict(state)
        assert torch.equal(resumed.next_batch().tokens, batch.tokens)


def test_held_out_conversations_are_never_trained_on(chat_file: Path) -> None:
    loader = loader_of(chat_file)
    held_out = {text(document.tokens.tolist()) for document in loader.validation_documents(99)}
    epoch = []
    while loader.state_dict()["epoch"] < 1:
        epoch += documents_of(loader, 1)
    assert held_out and not held_out & {prompt + answer for prompt, answer in epoch}
    (batch,) = loader.validation_batches(99, 99)
    assert batch.plain is not None and batch.counted == sum(int((d.targets != IGNORE).sum()) for d in loader.validation_documents(99))


def test_prompt_and_completion_columns(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"question": f"q{i}", "answer": f"a{i}"}) + "\n" for i in range(30)), encoding="utf-8")
    (tmp_path / "plain.jinja").write_text(PLAIN.source, encoding="utf-8")
    found = documents_of(loader_of(path, prompt_field="question", completion_field="answer", system="S"), 1)
    assert all(prompt.startswith("s:S\nu:q") and answer == f"a{prompt[prompt.index('q') + 1 : -3]}\n$" for prompt, answer in found)


def test_a_dataset_of_conversations(chat_file: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.load_dataset("json", data_files=str(chat_file), split="train", cache_dir=str(tmp_path / "cache")).save_to_disk(
        str(tmp_path / "saved")
    )
    loader = loader_of(chat_file, paths=[], dataset=str(tmp_path / "saved"), validation_documents=5)
    assert len(documents_of(loader, 2)) > 6 and len(loader.validation_documents(99)) >= 5


def test_the_template_goes_with_the_checkpoint(chat_file: Path, tmp_path: Path) -> None:
    loader_of(chat_file).save(tmp_path)
    assert (tmp_path / TEMPLATE_FILE).read_text(encoding="utf-8") == PLAIN.source
    assert "template" in loader_of(chat_file).fingerprint()
    assert loader_of(chat_file).fingerprint() != loader_of(chat_file, template=None).fingerprint()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "hi"}, r"chat.jsonl:1: no field 'messages'; the fields there are text \(set data.source.messages_field\)"),
        ({"messages": "hi"}, r"chat.jsonl:1: messages must be a list of messages, got str"),
        ({"messages": [{"role": "user"}]}, r"chat.jsonl:1: messages, message 0: not an object with role and content"),
        ({"messages": [{"role": "bot", "content": ""}]}, r"message 0: role must be one of system, user, assistant, got 'bot'"),
        ({"messages": [{"role": "user", "content": 3}]}, r"message 0: the field 'content' must be text, got int"),
        ({"messages": turns("only a question")}, r"chat.jsonl: no training conversation has an answer: a message of the assistant after"),
        ({"messages": []}, r"chat.jsonl: no training conversation has an answer"),
        ({"messages": [{"role": "assistant", "content": "hello"}]}, r"chat.jsonl: no training conversation has an answer"),
        (
            {"messages": turns("q" * 99, "a")},
            r"no training answer with its prompt fits sequences of 64 tokens .*data.length\); the shortest of the first 1 takes 107",
        ),
    ],
)
def test_a_bad_record_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    (tmp_path / "chat.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    (tmp_path / "plain.jinja").write_text(PLAIN.source, encoding="utf-8")
    loader = loader_of(tmp_path / "chat.jsonl", validation_fraction=0.0)
    for read in (loader.next_batch, loader.notices):
        with pytest.raises(ValueError, match=message):
            read()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [turns("q" * 99, "a"), turns("q" * 98, "a")],
            r"no held-out answer with its prompt fits sequences of 64 tokens .*; the shortest of the first 2 takes 106",
        ),
        ([turns("only a question")], "no held-out conversation has an answer: a message of the assistant after another one"),
        ([], "no held-out conversations in it$"),
    ],
)
def test_held_out_files_are_named(chat_file: Path, rows: list[Any], message: str) -> None:
    path = chat_file.with_name("held-out.jsonl")
    path.write_text("\n" + "".join(json.dumps({"messages": row}) + "\n" for row in rows), encoding="utf-8")
    loader = loader_of(chat_file, validation_paths=[str(path)])
    for read in (lambda: loader.validation_batches(9, 9), lambda: loader.validation_documents(9)):
        with pytest.raises(ValueError, match=f"^{path}: {message}"):
            read()


def test_what_is_not_held_out_of_one_file_is_said_with_the_fraction(chat_file: Path) -> None:
    chat_file.write_text("".join(chat_file.read_text().splitlines(keepends=True)[:1]))
    with pytest.raises(ValueError, match=r"chat.jsonl: no held-out conversations in it; change data.source.validation_fraction"):
        loader_of(chat_file, validation_fraction=1e-9).validation_batches(9, 9)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"kind": "chat"}, "name either paths or a dataset"),
        ({"kind": "chat", "paths": ["a"], "dataset": "b"}, "name either paths or a dataset"),
        ({"kind": "chat", "paths": ["a"], "prompt_field": "q"}, "prompt_field and completion_field must be given together"),
    ],
)
def test_a_source_says_what_it_reads(source: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig.model_validate({"source": source})


def test_an_answer_knows_its_length() -> None:
    answer = Answer(torch.arange(5).numpy(), 2)
    assert len(answer) == 5 and len(answer.document()) == 5
