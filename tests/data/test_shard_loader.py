"""Training on shards: every token once an epoch, one order for any number of ranks, exact state, shares of a mixture, faults in a line."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fullband.config import DataConfig
from fullband.data.batch import IGNORE, Batch
from fullband.data.build import build_loader
from fullband.data.shard_loader import shuffled
from fullband.data.shards import StoredTokens, read_manifest, shard_files
from fullband.data.tokenize import tokenize
from fullband.training import train

LENGTH = 16


def written(folder: Path, name: str, documents: int = 60, letter: str = "") -> Path:
    """Shards of documents of 1 to 130 bytes, some of several rows, no two alike."""
    source = folder / f"{name}.jsonl"
    texts = [f"{letter}{i}:" + (chr(97 + i % 26) * (i * 37 % 130)) for i in range(documents)]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    place = folder / name
    tokenize(DataConfig.model_validate({"source": {"kind": "files", "paths": [str(source)], "validation_fraction": 0.1}}), place, 1, 500)
    return place


def config_of(*folders: Path, **others: Any) -> DataConfig:
    given = {"source": {"kind": "shards", "folders": [str(folder) for folder in folders]} | others.pop("source", {})}
    return DataConfig.model_validate({**given, "tokenizer": str(folders[0]), "length": LENGTH, **others})


def batches(config: DataConfig, count: int, rank: int = 0, world: int = 1, rows: int = 4) -> list[Batch]:
    loader = build_loader(config, 7, rows, rank, world)
    return [loader.next_batch() for _ in range(count)]


def row_bytes(found: list[Batch]) -> list[bytes]:
    """Tokens and targets of each row."""
    return [
        b"".join(part.numpy().tobytes() for part in (tokens, targets))
        for batch in found
        for tokens, targets in zip(batch.tokens, batch.targets, strict=True)
    ]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("shuffle", [1, 1024])
def test_an_epoch_has_every_token_once(tmp_path: Path, packing: bool, shuffle: int) -> None:
    folder = written(tmp_path, "a")
    stored = StoredTokens(folder, "train", read_manifest(folder))
    config = config_of(folder, packing=packing, shuffle_documents=shuffle)
    loader: Any = build_loader(config, 7, 1)
    found: Counter[int] = Counter()
    scored = 0
    for batch in (loader.next_batch() for _ in range(loader._rows[0].count)):
        inside = batch.targets[0] != IGNORE
        scored += int(inside.sum())
        known = batch.layout.documents_BT[0] >= 0 if batch.layout.documents_BT is not None else torch.ones(LENGTH, dtype=torch.bool)
        found.update(batch.tokens[0][known].tolist())
    whole = np.concatenate([piece.tokens for piece in stored.pieces(0, stored.tokens)])
    assert found == Counter(whole.tolist())
    assert scored == stored.tokens - stored.documents, "all but each document's first are targets"


def test_the_order_is_one_for_any_number_of_ranks(tmp_path: Path) -> None:
    """The first 10,000 rows."""
    config = config_of(written(tmp_path, "a"), written(tmp_path, "b", 40, "b"), source={"weights": [0.3, 0.7]})
    alone = row_bytes(batches(config, 1250, rows=8))
    assert len(set(alone)) > 600, "epochs begin in other places"
    for world in (2, 4):
        parts = [batches(config, 1250, rank, world, rows=8) for rank in range(world)]
        together = [row for step in zip(*parts, strict=True) for row in row_bytes(list(step))]
        assert together == alone
    assert row_bytes(batches(config, 1, rows=8)) != row_bytes([build_loader(config, 8, 8).next_batch()]), "the seed decides"


def test_it_goes_on_from_its_state(tmp_path: Path) -> None:
    config = config_of(written(tmp_path, "a"), written(tmp_path, "b", 40, "b"))
    straight = row_bytes(batches(config, 60))
    first: Any = build_loader(config, 7, 4)
    begun = row_bytes([first.next_batch() for _ in range(23)])
    later: Any = build_loader(config, 7, 4)
    later.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert begun + row_bytes([later.next_batch() for _ in range(37)]) == straight
    later.load_state_dict(first.state_dict())
    assert row_bytes([later.next_batch()]) == straight[4 * 23 : 4 * 24]
    with pytest.raises(KeyError):
        later.load_state_dict({"row": 3, "taken": [1, 1]})


def test_a_mixture_has_its_shares_at_every_row(tmp_path: Path) -> None:
    loader: Any = build_loader(config_of(written(tmp_path, "a"), written(tmp_path, "b", 40, "b"), source={"weights": [1, 3]}), 7, 1)
    taken = [0, 0]
    for row, (folder, number) in enumerate(loader._plan(1000), start=1):
        assert number == taken[folder]
        taken[folder] += 1
        assert abs(taken[1] - 0.75 * row) <= 1


def test_shuffled_is_a_permutation() -> None:
    for count in (1, 2, 3, 7, 64, 1000):
        places = [shuffled(number, count, 5, "x") for number in range(count)]
        assert sorted(places) == list(range(count))
        assert count < 7 or (places != list(range(count)) and places != [shuffled(number, count, 6, "x") for number in range(count)])


def test_a_run_on_shards(tmp_path: Path) -> None:
    """The tokenizer is the shards' own; a run that was stopped goes on as one that was not; a dry run counts."""
    from fullband.config import Recipe

    folder = written(tmp_path, "a")

    def recipe(output: str, steps: int) -> Recipe:
        return Recipe.model_validate(
            {
                "name": "tiny", "output": str(tmp_path / output),
                "model": {"trunk": {"width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "glu_width": 24, "context": 32, "window": 6}},
                "data": {"source": {"kind": "shards", "folders": [str(folder)]}, "length": LENGTH},
                "optim": {"warmup_steps": 1},
                "train": {"steps": steps, "batch_rows": 4, "device": "cpu", "checkpoint_every": 3},
                "evaluation": {"rows": 4, "every": 3, "feedback_passes": [0]},
            }
        )  # fmt: skip

    result = train(recipe("straight", 6))
    assert result.steps == 6 and result.validation["0"] > 0
    assert json.loads((result.checkpoint / "config.json").read_text())["trunk"]["vocab_size"] == 257


def test_faults_are_named(tmp_path: Path) -> None:
    folder = written(tmp_path, "a")
    config = config_of(folder)
    loader: Any = build_loader(config, 7, 4)
    tokens, _ = shard_files(folder, "train", 0)
    content = tokens.read_bytes()
    tokens.write_bytes(content[:-8] + bytes([content[-8] ^ 1]) + content[-7:])
    with pytest.raises(ValueError, match=r"train-000000.tokens.npy: damaged: its SHA-256 is [0-9a-f]{64}, shards.json says"):
        build_loader(config, 7, 4)
    tokens.write_bytes(content[:-40])
    with pytest.raises(ValueError, match=r"train-000000.tokens.npy: cannot be read as a shard"):
        build_loader(config, 7, 4)
    for shard in folder.glob("train-*.tokens.npy"):
        shard.unlink()
    with pytest.raises(ValueError, match="cannot be read as a shard"):
        for _ in range(100):  # some were read ahead
            loader.next_batch()
    with pytest.raises(ValueError, match=r"shards\.json is missing"):
        build_loader(config_of(tmp_path).model_copy(update={"tokenizer": "bytes"}), 7, 4)
    other = written(tmp_path, "b")
    with pytest.raises(ValueError, match="holds ids of the tokenizer bytes"):
        build_loader(config_of(other).model_copy(update={"tokenizer": "program"}), 7, 4)
