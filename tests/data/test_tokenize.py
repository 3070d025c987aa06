"""`tokenize`: what is written, resumption, and faults."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fullband.config import DataConfig
from fullband.data.build import build_source
from fullband.data.shards import MANIFEST, StoredTokens, check_hashes, complete_manifest, read_manifest
from fullband.data.tokenize import tokenize
from fullband.data.tokenizers import load_tokenizer

SPLITS = ("train", "validation")


def config_of(path: Path, **options: Any) -> DataConfig:
    return DataConfig.model_validate({"source": {"kind": "files", "paths": [str(path)], "validation_fraction": 0.15}} | options)


def contents(folder: Path) -> dict[str, str]:
    """{file: hash} of all that is seen in a folder."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("shard_tokens", [1, 500, 10**6])
def test_shards_hold_every_document_of_the_source_in_its_order(jsonl: Path, tmp_path: Path, jobs: int, shard_tokens: int) -> None:
    config = config_of(jsonl)
    manifest, before = tokenize(config, tmp_path / "out", jobs, shard_tokens)
    assert before == 0 and manifest == complete_manifest(tmp_path / "out") and manifest.dtype == "uint16"
    assert len(list(check_hashes(tmp_path / "out", manifest))) == sum(manifest.total(split)["shards"] for split in SPLITS)
    for split in SPLITS:
        wanted = load_tokenizer("bytes").encode_documents([text for _, text in build_source(config.source).documents(split)])
        stored = StoredTokens(tmp_path / "out", split, manifest)
        assert stored.documents == len(wanted) > 3 and stored.tokens == sum(map(len, wanted))
        for number, tokens in enumerate(wanted):
            np.testing.assert_array_equal(stored.document(number), tokens)
        assert manifest.total(split)["shards"] == {1: len(wanted), 10**6: 1}.get(shard_tokens, manifest.total(split)["shards"])
    assert load_tokenizer(tmp_path / "out").name == manifest.tokenizer == "bytes"


def test_large_ids_are_kept(jsonl: Path, tmp_path: Path, shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(jsonl, tokenizer=str(shared_data / "tokenizers" / "cl100k_hf"))
    manifest, _ = tokenize(config, tmp_path / "out", 2)
    stored = StoredTokens(tmp_path / "out", "train", manifest)
    wanted = load_tokenizer(config.tokenizer).encode_documents([text for _, text in build_source(config.source).documents("train")])
    assert manifest.dtype == "uint32" and max(map(max, wanted)) > 2**16
    np.testing.assert_array_equal(np.concatenate([piece.tokens for piece in stored.pieces(0, stored.tokens)]), np.concatenate(wanted))


SCRIPT = """
import sys; from pathlib import Path
from fullband.config import DataConfig; from fullband.data.tokenize import tokenize
tokenize(DataConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2]), 2, 20_000)
"""


def processes_of(place: Path) -> list[str]:
    """Processes whose command names `place`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(place) in (process / "cmdline").read_text() and "Z" not in (process / "stat").read_text().split()[2]:
                found.append(process.name)
        except OSError:
            pass
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_kill_loses_no_shard_that_was_finished_and_leaves_no_process(tmp_path: Path) -> None:
    source = tmp_path / "many.jsonl"
    source.write_text("".join(json.dumps({"text": f"{i} " * (50 + i * i % 997)}) + "\n" for i in range(3000)))
    config = config_of(source)
    tokenize(config, tmp_path / "whole", 1, 20_000)
    folder, finished, kills = tmp_path / "killed", 0, 0
    times: list[int] = []
    for more in (1, 9, 40, 10_000):
        process = subprocess.Popen([sys.executable, "-c", SCRIPT, config.model_dump_json(), str(folder)])
        stop = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < stop:
            if (folder / MANIFEST).is_file() and read_manifest(folder).total("train")["shards"] >= finished + more:
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.001)
        process.wait()
        while processes_of(folder) and time.monotonic() < stop:
            time.sleep(0.01)
        assert not processes_of(folder)
        listed = read_manifest(folder).total("train")["shards"]
        assert listed >= finished
        if finished:  # what had been finished was not written again
            assert times == [path.stat().st_mtime_ns for path in tokens_of(folder)[:finished]]
        finished = listed
        times = [path.stat().st_mtime_ns for path in tokens_of(folder)[:finished]]
    assert kills == 3 and finished > 50
    assert contents(folder) == contents(tmp_path / "whole")
    again, before = tokenize(config, folder, 1, 20_000)
    assert before == sum(again.total(split)["tokens"] for split in SPLITS)


def tokens_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("train-*.tokens.npy"))


def test_a_full_disk_keeps_what_was_finished(jsonl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, fsync = config_of(jsonl), os.fsync
    calls = iter(range(1000))

    def full(descriptor: int) -> None:
        if next(calls) >= 12:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    tokenize(config, tmp_path / "whole", 1, 500)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match=r"out/\S+\.\w+: No space left on device; the same command goes on after the shards"):
        tokenize(config, tmp_path / "out", 1, 500)
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(ValueError, match=r"only half written \([\d,]+ tokens so far\)"):
        complete_manifest(tmp_path / "out")
    _, before = tokenize(config, tmp_path / "out", 1, 500)
    assert before and contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_process_that_dies_is_named(jsonl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fullband.data.tokenize._encode", _die)
    with pytest.raises(ValueError, match="a process that tokenises has died: out of memory, or killed; the same command goes on"):
        tokenize(config_of(jsonl), tmp_path / "out", 1)


def _die(texts: list[str]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_does_not_belong_together_is_refused(jsonl: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    tokenize(config_of(jsonl), folder, 1, 500)
    for options, what in (
        ({"tokenizer": "program"}, "another tokenizer"),
        ({"source": {"kind": "files", "paths": [str(jsonl)], "validation_fraction": 0.3}}, "another source"),
    ):
        with pytest.raises(ValueError, match=f"out: was begun with {what} .*; choose another folder"):
            tokenize(config_of(jsonl, **options), folder, 1, 500)
    with pytest.raises(ValueError, match="another shard tokens"):
        tokenize(config_of(jsonl), folder, 1, 501)
    with pytest.raises(ValueError, match="holds other files and no shards"):
        tokenize(config_of(jsonl), tmp_path, 1)
    with pytest.raises(ValueError, match="must be text to tokenise"):
        tokenize(DataConfig.model_validate({"source": {"kind": "task"}}), tmp_path / "other", 1)


def test_damage_is_named_by_file_and_hash(jsonl: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    manifest, _ = tokenize(config_of(jsonl), folder, 1, 500)
    victim = folder / "train-000002.tokens.npy"
    content = bytearray(victim.read_bytes())
    content[-5] ^= 1
    victim.write_bytes(content)
    found = hashlib.sha256(content).hexdigest()
    wanted = f"train-000002.tokens.npy: damaged: its SHA-256 is {found}, shards.json says {manifest.shards['train'][2].tokens_sha256}"
    with pytest.raises(ValueError, match=wanted):
        list(check_hashes(folder, manifest))
    victim.write_bytes(content[:-2])
    with pytest.raises(ValueError, match=r"train-000002\.tokens\.npy: cannot be read as a shard of [\d,]+ uint16"):
        StoredTokens(folder, "train", manifest)
    victim.unlink()
    for act in (lambda: StoredTokens(folder, "train", manifest), lambda: list(check_hashes(folder, manifest))):
        with pytest.raises(ValueError, match=r"train-000002\.tokens\.npy: .*(No such file|missing)"):
            act()


def test_manifests_of_others_are_refused(jsonl: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tokenised shards there"):
        read_manifest(tmp_path)
    tokenize(config_of(jsonl), tmp_path / "out", 1)
    path = tmp_path / "out" / MANIFEST
    whole = json.loads(path.read_text())
    for content, message in (
        (json.dumps(whole | {"format": 2}), "must be of format 1, got 2: another version of fullband made it"),
        (json.dumps(whole | {"dtype": "float8"}), "dtype: must be 'uint16' or 'uint32'"),
        (path.read_text()[:100], "not readable as JSON"),
        ("[]", "must be a section of keys"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            read_manifest(tmp_path / "out")


def test_sources_say_how_far_they_are(jsonl: Path) -> None:
    for kind in ({"kind": "files", "paths": [str(jsonl)]}, {"kind": "python-stdlib"}, {"kind": "program-text", "documents": 50}):
        source = build_source(DataConfig.model_validate({"source": kind}).source)  # type: ignore[arg-type]
        parts = [source.progress() for _ in source.documents("train")]
        assert parts == sorted(parts) and 0 <= parts[0] < 1 and parts[-1] > 0.9
