"""Files that survive a crash: written beside their place, flushed to disk, renamed; and checked when read."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

MANIFEST, LOCK, TRAINING = "manifest.json", ".lock", "training.json"


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A file to write that takes the place of `path` once it is whole, and is removed if it could not be written."""
    beside = path.with_name(f".{path.name}.partial")
    try:
        yield beside
        os.replace(beside, path)
    except BaseException as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)  # on a full disk, half a checkpoint is in the way of everything else
        if isinstance(error, OSError) and error.strerror and error.filename is None:
            error.filename = str(path)
        raise
    sync_folder(path.parent)


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """Replace `path` by `content`: a crash at any moment leaves the old file or the new one, whole."""
    with _beside(path) as beside, open(beside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """Raises ValueError naming the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not readable as JSON ({' '.join(str(error).split())})") from None


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Replace `path` by a safetensors file of `tensors`. Raises OSError if it can't be written."""
    with _beside(path) as beside:
        try:
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, beside)
        except SafetensorError as error:
            raise OSError(f"{path}: could not be written ({error})") from None
        with open(beside, "rb") as file:
            os.fsync(file.fileno())


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file, on the CPU. Raises ValueError naming the file if it is missing or damaged."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path}: damaged or not a safetensors file ({error})") from None


@contextmanager
def new_folder(place: Path, replace: bool = False) -> Iterator[Path]:
    """A folder to fill that becomes `place` once it is whole, and is removed if it could not be filled. A kill leaves no half of it at
    `place`; what it leaves beside it, the next attempt removes.

    Raises ValueError naming `place` if it exists, unless `replace`, and if it cannot be written.
    """
    if os.path.lexists(place) and not replace:
        raise ValueError(f"{place}: exists already")
    partial, old = (place.with_name(f".{place.name}.{word}") for word in ("partial", "replaced"))
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        for path in partial.rglob("*"):
            if path.is_file():
                with open(path, "rb+") as file:
                    os.fsync(file.fileno())
        if place.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(place, old)
        os.replace(partial, place)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise ValueError(f"{place}: cannot be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    sync_folder(place.parent)


def check_place(folder: Path) -> None:
    """Raises ValueError naming `folder` if nothing can be written there: asked before the work whose results it is for."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ValueError(f"{folder}: can't be written ({existing} is {'not writable' if existing.is_dir() else 'no folder'})")


class InUseError(ValueError):
    """Another process is at work in a folder."""


@contextmanager
def alone_in(folder: Path, name: str = LOCK) -> Iterator[None]:
    """While the block runs, no other process gets `folder` from here; where its process ends, however it ends, it is given back.

    name   of the lock file: another name is another lock
    Raises InUseError if another process has it. A file system without locks gives it to everybody.
    """
    lock = FileLock(folder / name)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise InUseError(f"{folder}: another process is at work there; let it end, or choose another folder") from None
    except NotImplementedError:
        pass
    except PermissionError:
        raise ValueError(f"{folder}: can't be written") from None
    try:
        yield
    finally:
        lock.release()


def write_manifest(folder: Path, names: list[str]) -> None:
    """Record the SHA-256 of each file, so that a flipped bit is found when it is read."""
    write_json(folder / MANIFEST, {name: file_hash(folder / name) for name in sorted(names)})


def verify_manifest(folder: Path) -> None:
    """Raises ValueError naming the first file that differs from the folder's manifest, and weights or training state that it does not list.

    A model folder without a manifest passes, as other libraries write none; a checkpoint of a run (it has a training.json) does not.
    """
    path = folder / MANIFEST
    if not path.is_file():
        if (folder / TRAINING).is_file():
            raise ValueError(f"{path}: missing: nothing tells whether the checkpoint is whole")
        return
    try:
        recorded = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: damaged ({error})") from None
    of_a_run = sorted(name for name in ("optimizer.safetensors", TRAINING) if (folder / TRAINING).is_file())
    for name in (*sorted(weights.name for weights in folder.glob("model*.safetensors")), *of_a_run):
        if name not in recorded:
            raise ValueError(f"{path}: damaged: it does not list {name}")
    for name, expected in recorded.items():
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name}: missing, but listed in {MANIFEST}")
        if file_hash(folder / name) != expected:
            raise ValueError(f"{folder / name}: damaged: its content is not what was saved (SHA-256 differs from {MANIFEST})")


def file_hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(folder: Path) -> None:
    """Make a rename durable. Windows cannot open folders and needs no such call."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
