"""Models and servers for these tests. Near-isometric weights: with ordinary ones rounding grows with every fed-back token."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fullband.data.tokenizers import ByteTokenizer
from fullband.model import FullBandModel
from fullband.serve.engine import LocalEngine
from fullband.serve.scheduler import Scheduler

CONTEXT = 96


@pytest.fixture(scope="session")
def served_model() -> FullBandModel:
    """A float64 model over bytes whose maps keep lengths."""
    import torch
    from torch import nn

    from fullband.config import TrunkConfig

    torch.manual_seed(5)
    shape = TrunkConfig(vocab_size=257, width=32, layers=2, heads=2, kv_heads=1, glu_width=64, context=CONTEXT, window=16, full_every=2)
    model = FullBandModel(shape).double().eval()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight)
    return model


@pytest.fixture
def scheduler(served_model: FullBandModel) -> Iterator[Scheduler]:
    made = Scheduler(LocalEngine(served_model, chunk=16), ByteTokenizer(), most_rows=4, most_waiting=64)
    yield made
    made.close(timeout=20)
    assert not made._thread.is_alive()


@pytest.fixture
def serving(scheduler: Scheduler) -> Iterator[Callable[..., str]]:
    """Starts a server over a socket; gives its address."""
    uvicorn = pytest.importorskip("uvicorn")
    from fullband.serve.app import Server, Settings
    from fullband.serve.connections import web_config

    running: list[Any] = []

    def start(template: Any = None, scheduler: Scheduler = scheduler, app: Any = None, **settings: Any) -> str:
        app = app or Server(scheduler, scheduler.tokenizer, template, Settings(**{"name": "tiny", **settings})).app()
        config = web_config(app, settings.get("idle_seconds", 30))
        bound = socket.socket()
        bound.bind(("127.0.0.1", 0))
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        running.append((server, thread))
        while not server.started:
            time.sleep(0.01)
        return f"http://127.0.0.1:{bound.getsockname()[1]}"

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join(10)
