"""Shared by all tests: poisoned fresh memory, small models with near-isometric weights, packed rows."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tests run side by side, and OpenMP threads that wait for each other spin
gc.disable()  # until all is imported: see pytest_collection_finish

import pytest
import torch
from torch import Tensor, nn

from fullband.config import TrunkConfig
from fullband.feedback_config import ConnectionConfig
from fullband.model import FullBandModel

sys.path.insert(0, str(Path(__file__).parent))  # so that tests find the slow references: `from reference.decoder import …`

SHAPE: dict[str, Any] = dict(vocab_size=23, width=16, layers=3, heads=4, kv_heads=2, glu_width=24, context=64, window=5, full_every=3)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of minutes first, the longest before the others: a process that begins one of them last keeps everybody waiting."""
    marks = {item: item.get_closest_marker("slow") for item in items}
    items.sort(key=lambda item: -mark.kwargs.get("minutes", 0) if (mark := marks[item]) else 0)


def pytest_collection_finish() -> None:
    """The garbage collector leaves alone what imports and collection made: half a second for each time it goes through it all."""
    gc.enable()
    gc.collect()
    gc.freeze()


# Under nohup SIGHUP is ignored, behind & SIGINT, which runs respect: the tests of them would be deaf.
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def poisoned_memory() -> Iterator[None]:
    """Floating-point memory that nobody has written yet holds NaN: code that reads it fails everywhere, not now and then."""

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def fresh(*args: Any, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            if tensor.is_floating_point():
                with torch.no_grad():
                    tensor.fill_(float("nan"))
            return tensor

        return fresh

    with torch.device("meta"):
        torch.empty(0)  # such blocks remember, at their first use, which functions make tensors: let it be the real ones
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
            patch.setattr(owner, name, poisoned(getattr(owner, name)))
        yield


@pytest.fixture
def trunk_config() -> Callable[..., TrunkConfig]:
    """A small decoder shape, with overrides."""

    def make(**overrides: Any) -> TrunkConfig:
        return TrunkConfig(**(SHAPE | overrides))

    return make


@pytest.fixture
def isometric_model(trunk_config: Callable[..., TrunkConfig]) -> Callable[..., FullBandModel]:
    """A float64 model whose maps keep lengths. Parity needs it: with ordinary random weights an error grows with every fed-back token,
    so two correct computations drift apart. Norm weights differ from 1 and the residual entry is open, so that a forgotten one shows."""

    def make(
        fusion: Any = "gated", seed: int = 0, source: Any = "top", entry: Any = 0, carried_window: int = 1, **overrides: Any
    ) -> FullBandModel:
        torch.manual_seed(seed)
        connection = ConnectionConfig(fusion=fusion, source=source, entry=entry, window=carried_window)
        model = FullBandModel(trunk_config(**overrides), connection).double()
        for name, parameter in model.connection.named_parameters():
            if name in ("mix", "ages"):
                nn.init.normal_(parameter)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight)
            elif isinstance(module, nn.RMSNorm):
                nn.init.uniform_(module.weight, 0.9, 1.1)
        return model.eval()

    return make


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(source, converted): SmolLM2-135M-Instruct, dequantised, and what the command line made of it. A minute's work: its tests are of the
    xdist group "smollm2". FULLBAND_SMOLLM2 names a source that `python -m benchmarks.smollm2` has made already."""
    from benchmarks.smollm2 import package_folder, write_source

    from cli.commands import fullband

    folder = tmp_path_factory.mktemp("smollm2")
    source = Path(os.environ.get("FULLBAND_SMOLLM2") or folder / "source")
    if not source.is_dir():
        try:
            package_folder()
        except ValueError as missing:
            pytest.skip(str(missing))
        write_source(source)
    done = fullband("convert", source, "-o", folder / "converted")
    assert done.code == 0, done.err
    return source, folder / "converted"


@dataclass(frozen=True)
class Rows:
    """Tokens, positions and documents [B, T] of packed rows, with targets of which an uneven part is scored."""

    tokens: Tensor
    positions: Tensor
    documents: Tensor
    targets: Tensor


@pytest.fixture
def packed_rows() -> Callable[[list[list[int]]], Rows]:
    """Rows made of documents of the given lengths; a negative length is padding."""

    def make(lengths: list[list[int]], vocab: int = SHAPE["vocab_size"]) -> Rows:
        generator = torch.Generator().manual_seed(1)
        documents = [[-1 if n < 0 else d for d, n in enumerate(row) for _ in range(abs(n))] for row in lengths]
        positions = [[t for n in row for t in range(abs(n))] for row in lengths]
        shape = (len(lengths), len(positions[0]))
        tokens, targets = (torch.randint(vocab, shape, generator=generator) for _ in range(2))
        documents_BT = torch.tensor(documents)
        scored = torch.rand(shape, generator=generator) < torch.linspace(0.2, 1.0, shape[0])[:, None]
        return Rows(tokens, torch.tensor(positions), documents_BT, targets.where(scored & (documents_BT >= 0), torch.tensor(-100)))

    return make


@pytest.fixture
def killed_while() -> Callable[[Callable[[int], None]], Iterator[None]]:
    """Runs `work(0)`, `work(1)`, … in a child that dies by SIGKILL some time after the first has ended; yields after each of 25 deaths."""
    if not hasattr(os, "fork"):
        pytest.skip("killing a child that shares the test's memory needs fork")

    def run(work: Callable[[int], None]) -> Iterator[None]:
        for name in ("tqdm", "tqdm.auto"):  # its lock is shared with children: one that dies with it would stop the test for good
            if bars := sys.modules.get(name):
                bars.tqdm.monitor_interval = 0
                bars.tqdm.set_lock(threading.RLock())
        for n in range(25):
            ready, tell = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    for i in range(100_000):
                        work(i)
                        os.write(tell, b".") if i == 0 else None
                finally:
                    os._exit(1)
            os.close(tell)
            assert os.read(ready, 1), "the child failed by itself"
            os.close(ready)
            time.sleep(0.0011 * n)
            os.kill(child, signal.SIGKILL)
            assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the child failed by itself"
            yield

    return run
