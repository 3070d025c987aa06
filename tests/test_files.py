"""A crash at any moment, or a full disk, leaves the old file or the new one, whole; damage is found when a file is read."""

import errno
import hashlib
import os
import re
import subprocess
import sys

import pytest
import torch
from safetensors import SafetensorError

from fullband import files
from fullband.files import (
    alone_in,
    check_place,
    file_hash,
    read_tensors,
    verify_manifest,
    write_bytes,
    write_json,
    write_manifest,
    write_tensors,
)


def test_round_trips(tmp_path):
    write_bytes(tmp_path / "a", b"x")
    write_bytes(tmp_path / "a", b"yy")
    assert (tmp_path / "a").read_bytes() == b"yy"
    write_json(tmp_path / "j", {"σ": [1, None]})
    assert "σ" in (tmp_path / "j").read_text(encoding="utf-8")
    tensors = {"a": torch.randn(3, 4).T, "b": torch.arange(5), "c": torch.ones(2, dtype=torch.bfloat16), "d": torch.zeros(0, 3)}
    write_tensors(tmp_path / "t", tensors)
    for name, tensor in read_tensors(tmp_path / "t").items():
        assert torch.equal(tensor, tensors[name]) and tensor.dtype == tensors[name].dtype
    assert {p.name for p in tmp_path.iterdir()} == {"a", "j", "t"}


@pytest.mark.parametrize(
    "damage", [lambda b: b[: len(b) // 2], lambda b: b[:5], lambda b: b"", lambda b: bytes([b[0] ^ 255]) + b[1:], lambda b: b[:-1]]
)
def test_a_damaged_tensor_file_is_named(tmp_path, damage):
    path = tmp_path / "t.safetensors"
    write_tensors(path, {"a": torch.randn(30)})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match="damaged or not a safetensors file") as caught:
        read_tensors(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_tensor_file_is_named(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ValueError, match=f"{path.name}: no such file"):
            read_tensors(path)


def test_manifest_finds_every_kind_of_change(tmp_path):
    for name in ("a", "b"):
        write_bytes(tmp_path / name, name.encode() * 9)
    verify_manifest(tmp_path)  # none yet
    write_manifest(tmp_path, ["b", "a"])
    verify_manifest(tmp_path)
    flipped = bytearray(b"b" * 9)
    flipped[4] ^= 1
    (tmp_path / "b").write_bytes(bytes(flipped))
    with pytest.raises(ValueError, match=r"b: damaged: its content is not what was saved"):
        verify_manifest(tmp_path)
    (tmp_path / "b").unlink()
    with pytest.raises(ValueError, match=r"b: missing, but listed in manifest\.json"):
        verify_manifest(tmp_path)
    for content in (b"{", b"3", b"[1]", b"\xff"):
        (tmp_path / "manifest.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"manifest\.json: damaged"):
            verify_manifest(tmp_path)
    assert file_hash(tmp_path / "a") == hashlib.sha256(b"a" * 9).hexdigest()


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def half_a_file(tensors, path):
    path.write_bytes(b"half")
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("where", ["data", "flush"])
def test_a_full_disk_leaves_the_old_files(tmp_path, monkeypatch, where):
    tensors = {"a": torch.ones(3)}
    write_bytes(tmp_path / "a", b"old")
    write_tensors(tmp_path / "t", tensors)
    with monkeypatch.context() as disk:
        if where == "data":
            disk.setattr(files, "save_file", half_a_file)
            disk.setattr(files, "open", full, raising=False)
        else:
            disk.setattr(files.os, "fsync", full)
        for write in (lambda: write_bytes(tmp_path / "a", b"new"), lambda: write_tensors(tmp_path / "t", {"a": torch.zeros(3)})):
            with pytest.raises(OSError, match="No space left"):
                write()
    assert (tmp_path / "a").read_bytes() == b"old" and torch.equal(read_tensors(tmp_path / "t")["a"], tensors["a"])
    assert {p.name for p in tmp_path.iterdir()} == {"a", "t"}, "half-written files are in the way"
    write_bytes(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"


def test_what_a_crash_left_behind_does_not_matter(tmp_path):
    (tmp_path / ".a.partial").write_bytes(b"a longer rest of an earlier attempt")
    write_bytes(tmp_path / "a", b"new")
    (tmp_path / ".t.partial").write_bytes(b"rest")
    write_tensors(tmp_path / "t", {"a": torch.ones(3)})
    assert (tmp_path / "a").read_bytes() == b"new" and {p.name for p in tmp_path.iterdir()} == {"a", "t"}


def test_kill_at_any_moment_leaves_whole_files(tmp_path, killed_while):
    def work(i):
        write_tensors(tmp_path / "t", {"a": torch.zeros(20_000).fill_(i)})
        write_json(tmp_path / "j", [i] * 2000)

    seen = set()
    for _ in killed_while(work):
        value = read_tensors(tmp_path / "t")["a"].unique().tolist()
        assert len(value) == 1 and len(set(files.json.loads((tmp_path / "j").read_text()))) == 1
        seen.add(value[0])
    assert seen <= set(map(float, range(100_000)))


def test_one_process_at_a_time(tmp_path):
    """A second process is refused, and the lock goes with its holder, even one that is killed."""
    holder = "import sys, time, pathlib; from fullband.files import alone_in\n"
    holder += "with alone_in(pathlib.Path(sys.argv[1])):\n print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", holder, tmp_path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="another process is at work there"), alone_in(tmp_path):
            pass
        process.kill()
    with alone_in(tmp_path):
        pass


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    check_place(tmp_path / "new" / "folder")
    for place in (tmp_path / "file", tmp_path / "file" / "folder"):
        with pytest.raises(ValueError, match=f"{place}: can't be written .*file is no folder"):
            check_place(place)
    assert not (tmp_path / "new").exists()


def test_a_full_disk_is_named_with_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match=re.escape(str(tmp_path / "a"))):
        write_bytes(tmp_path / "a", b"new")
