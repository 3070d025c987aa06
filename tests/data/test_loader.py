"""Order, state and splits of the text loader."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from fullband.config import DataConfig
from fullband.data import IGNORE, PADDING, Batch, TextLoader, build_loader


def loader_of(path: Path | str, seed: int = 0, batch_rows: int = 4, rank: int = 0, world: int = 1, **options: Any) -> TextLoader:
    source = {"kind": "files", "paths": [str(path)], "validation_fraction": options.pop("validation_fraction", 0.15)}
    config = DataConfig.model_validate({"source": source, "length": 32, "shuffle_documents": 16} | options)
    loader = build_loader(config, seed, batch_rows, rank, world)
    assert isinstance(loader, TextLoader)
    return loader


def same(one: Batch, other: Batch) -> bool:
    return all(a is b is None or torch.equal(a, b) for a, b in zip(vars(one).values(), vars(other).values(), strict=True))


def text_of(loader: TextLoader, batches: int) -> list[str]:
    """Documents of the next batches, put together again; the last one may be cut."""
    ids = torch.cat([loader.next_batch().tokens.flatten() for _ in range(batches)]).tolist()
    return bytes(token if token < 256 else 0 for token in ids).decode("utf-8", errors="replace").split("\0")


def batches_in(loader: TextLoader, epochs: int) -> int:
    """Batches that reach into epoch number `epochs`."""
    count = 0
    while loader.state_dict()["epoch"] < epochs:
        loader.next_batch()
        count += 1
    return count


def test_the_state_is_exact_at_every_batch_and_across_epochs(jsonl: Path) -> None:
    count = batches_in(loader_of(jsonl), 3) + 2
    loader = loader_of(jsonl)
    states, batches = [], []
    for _ in range(count):
        states.append(json.loads(json.dumps(loader.state_dict())))
        batches.append(loader.next_batch())
    assert any(state["offset"] for state in states) and {state["block"] for state in states} >= {0, 1, 2}
    twice = loader_of(jsonl)  # loaded again and again
    for at, state in enumerate(states):
        resumed = loader_of(jsonl)
        resumed.load_state_dict(state)
        twice.load_state_dict(state)
        assert resumed.state_dict() == state
        for ahead in range(at, min(at + 3, count)):
            assert same(resumed.next_batch(), batches[ahead])
        assert same(twice.next_batch(), batches[at])


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_the_rows_of_one_global_batch(jsonl: Path, world: int) -> None:
    whole = loader_of(jsonl)
    ranks = [loader_of(jsonl, rank=rank, world=world) for rank in range(world)]
    for _ in range(12):
        batch = whole.next_batch()
        parts = [rank.next_batch() for rank in ranks]
        tensors = zip(*((p.tokens, p.targets, p.positions, p.documents) for p in parts), strict=True)
        assert same(Batch(*(torch.cat(values) for values in tensors)), batch)
        assert all(rank.state_dict() == whole.state_dict() for rank in ranks)
    with pytest.raises(ValueError, match=r"^batch_rows \(4\) must be a multiple of the number of processes \(3\)$"):
        loader_of(jsonl, world=3)


def test_every_epoch_has_every_training_document_once_in_another_order(jsonl: Path, corpus: list[str]) -> None:
    held_out = {bytes(document.tokens[:-1].tolist()).decode() for document in loader_of(jsonl).validation_documents(99)}
    assert 2 < len(held_out) < 20
    documents = text_of(loader_of(jsonl), batches_in(loader_of(jsonl), 2))
    size = len(corpus) - len(held_out)
    first, second = documents[:size], documents[size : 2 * size]
    assert Counter(first) == Counter(second) == Counter(set(corpus) - held_out)
    in_order = [text for text in corpus if text not in held_out]
    assert first != second and first != in_order
    assert set(first[:16]) == set(in_order[:16])  # shuffled block by block
    assert text_of(loader_of(jsonl, seed=1), 30)[:size] != first
    assert text_of(loader_of(jsonl, shuffle_documents=1), batches_in(loader_of(jsonl), 1))[:size] == in_order


def test_batches_are_full_and_know_their_documents(jsonl: Path) -> None:
    loader = loader_of(jsonl)
    for _ in range(20):
        batch = loader.next_batch().validate(loader.vocab_size)
        assert batch.shape == (4, 32) and (batch.documents != PADDING).all()
        ends = batch.tokens == 256
        assert (batch.targets[ends] == IGNORE).all() and (batch.targets[~ends] != IGNORE).all()
        assert torch.equal(batch.targets[:, :-1][~ends[:, :-1]], batch.tokens[:, 1:][~ends[:, :-1]])
        assert torch.equal(batch.documents[:, 1:] - batch.documents[:, :-1], ends[:, :-1].long())


def test_targets_are_the_stream_shifted_also_across_rows_and_batches(jsonl: Path) -> None:
    loader = loader_of(jsonl, batch_rows=2)
    batches = [loader.next_batch() for _ in range(batches_in(loader_of(jsonl, batch_rows=2), 4))]  # some cut just before an end
    tokens, targets = (
        torch.cat([value.flatten() for value in values]) for values in zip(*((b.tokens, b.targets) for b in batches), strict=True)
    )
    within = tokens[:-1] != 256
    assert torch.equal(targets[:-1][within], tokens[1:][within]) and (targets[:-1][~within] == IGNORE).all()
    assert any(batch.targets[-1, -1] == 256 for batch in batches)


def test_a_batch_can_span_several_epochs(tmp_path: Path) -> None:
    (tmp_path / "tiny.txt").write_text("abc")
    loader = loader_of(tmp_path / "tiny.txt", validation_fraction=0)
    assert "".join(text_of(loader, 1)) == "abc" * 32
    state = loader.state_dict()
    after = loader.next_batch()
    loader.load_state_dict(state)
    assert same(loader.next_batch(), after)


def test_validation_is_the_same_whatever_the_seed_and_the_progress(jsonl: Path) -> None:
    one, other = loader_of(jsonl), loader_of(jsonl, seed=5)
    one.next_batch()
    first, second = one.validation_batches(7, 3), other.validation_batches(7, 3)
    assert [batch.shape for batch in first] == [(3, 32), (3, 32), (1, 32)]
    assert all(same(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(one.validation_documents(5)[1].tokens, other.validation_documents(2)[1].tokens)
    every = other.validation_batches(10_000, 10_000)[0]
    assert every.counted == sum(int((document.targets != IGNORE).sum()) for document in other.validation_documents(99))
    assert other.validation_batches(2, 2, length=64)[0].shape == (2, 64)


def test_nothing_to_train_or_validate_on(tmp_path: Path, jsonl: Path) -> None:
    with pytest.raises(
        ValueError, match=r"corpus\.jsonl: no documents are held out for validation; change data\.source\.validation_fraction"
    ):
        loader_of(jsonl, validation_fraction=0).validation_batches(2, 2)
    (tmp_path / "blank.txt").write_text(" \n\n")
    with pytest.raises(ValueError, match=r"blank\.txt: no training documents in it; change data\.source\.validation_fraction, or name"):
        loader_of(tmp_path / "blank.txt").next_batch()
    with pytest.raises(ValueError, match=r"blank\.txt: holds no text$"):
        loader_of(tmp_path / "blank.txt").validation_batches(2, 2)


def test_the_fingerprint_names_what_decides_the_data(jsonl: Path) -> None:
    first = loader_of(jsonl).fingerprint()
    assert first == loader_of(jsonl, seed=3, batch_rows=8).fingerprint() == json.loads(json.dumps(first))
    assert first["tokenizer"] == "bytes" and first["files"].startswith("1 files, ")
    assert first != loader_of(jsonl, length=64).fingerprint()


def test_importing_the_package_imports_no_optional_one() -> None:
    program = """
import sys, fullband.data
from fullband.config import DataConfig
fullband.data.build_loader(DataConfig(), 0, 4).next_batch()
print([name for name in ("transformers", "datasets", "pyarrow", "tiktoken", "zstandard", "tokenizers") if name in sys.modules])
"""
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.shared_data
def test_real_corpora(shared_data: Path) -> None:
    corpora = shared_data / "corpora"
    for name in ("tinyshakespeare.txt", "stories_*.jsonl.gz", "python_stdlib.jsonl.gz"):
        loader = loader_of(corpora / name, length=256, validation_fraction=0.05)
        loader.next_batch().validate(loader.vocab_size)
        assert loader.validation_batches(8, 8)[0].shape == (8, 256)
    shakespeare = loader_of(corpora / "tinyshakespeare.txt", length=256, validation_fraction=0, shuffle_documents=1)
    text = (corpora / "tinyshakespeare.txt").read_text(encoding="utf-8")
    assert text.startswith("".join(text_of(shakespeare, 40)))
