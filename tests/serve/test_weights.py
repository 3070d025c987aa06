"""Weights that a trainer replaces: all or nothing, between answers, by whoever has the key and from one folder only."""

from __future__ import annotations

import copy
import json
import pickle
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from cli.commands import refused
from fullband.data.tokenizers import ByteTokenizer
from fullband.decode import generate_texts
from fullband.decode.options import GenerateOptions
from fullband.files import read_tensors, write_tensors
from fullband.model import FullBandModel
from fullband.serve.client import Client
from fullband.serve.prefixes import PrefixCache
from fullband.serve.rows import Event, Request
from fullband.serve.scheduler import FullError, Scheduler
from fullband.serve.weights import new_weights, replace_weights

PROMPT = "a prompt of forty characters, about that"


@pytest.fixture
def served_model(served_model: FullBandModel) -> FullBandModel:  # a copy, for its weights are replaced
    return copy.deepcopy(served_model)


@pytest.fixture
def other(served_model: FullBandModel) -> FullBandModel:
    """The same shape, other weights."""
    made = copy.deepcopy(served_model)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(parameter[torch.randperm(len(parameter), generator=generator)])
    return made


def alone(model: FullBandModel, prompt: str = PROMPT, most: int = 20) -> str:
    return generate_texts(model, ByteTokenizer(), [prompt], "soft", max_new_tokens=most)[0].text


def ask(address: str, prompt: str = PROMPT, key: str = "k") -> str:
    body = {"prompt": prompt, "max_tokens": 20, "temperature": 0}
    answer = httpx.post(f"{address}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=30).json()
    return str(answer["choices"][0]["text"])


def put(address: str, body: Any, key: str = "k") -> httpx.Response:
    return httpx.post(f"{address}/fullband/weights", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=30)


def test_answers_are_of_the_new_weights(
    served_model: FullBandModel, other: FullBandModel, scheduler: Scheduler, serving: Callable[..., str], tmp_path: Path
) -> None:
    before, after = alone(served_model), alone(other)
    assert before != after
    address = serving(key="k", weights=tmp_path)
    engine: Any = scheduler.engine
    engine.prefixes = PrefixCache(2**20)
    assert ask(address) == before and len(engine.prefixes) > 0
    other.save(tmp_path / "step-1")
    assert Client(address, "k").put_weights("step-1") == 1
    assert len(engine.prefixes) == 0, "what is kept of prompts was of the old weights"
    assert ask(address) == after and ask(address) == after
    file = tmp_path / "back.safetensors"
    write_tensors(file, read_tensors(tmp_path / "step-1" / "model.safetensors"))
    assert put(address, {"path": "back.safetensors"}).json() == {"updates": 2, "tensors": len(other.state_dict())}
    assert Client(address, "k")._model["updates"] == 2


def test_weights_stay_unless_the_server_was_told(serving: Callable[..., str], tmp_path: Path) -> None:
    answer = put(serving(key="k"), {"path": "x"})
    assert answer.status_code == 403 and "--allow-weight-updates" in answer.json()["error"]["message"]
    for key in ("none", "wrong"):
        assert put(serving(key="k", weights=tmp_path), {"path": "x"}, key).status_code == 401
    with pytest.raises(ValueError, match="give one"):
        serving(weights=tmp_path)


def test_what_is_wrong_changes_nothing(
    served_model: FullBandModel, other: FullBandModel, serving: Callable[..., str], tmp_path: Path
) -> None:
    folder = tmp_path / "weights"
    good = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    first, last = sorted(good)[0], sorted(good)[-1]

    def write(name: str, tensors: dict[str, torch.Tensor]) -> None:
        write_tensors(folder / f"{name}.safetensors", tensors)

    folder.mkdir()
    write_tensors(tmp_path / "outside.safetensors", good)
    (folder / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    write("missing", {name: tensor for name, tensor in good.items() if name != last})
    write("more", good | {"another": torch.ones(2)})
    write("shape", good | {last: torch.ones(3, 5)})
    write("nan", good | {last: torch.full_like(good[last], float("nan"))})
    write("short", good)
    content = (folder / "short.safetensors").read_bytes()
    (folder / "short.safetensors").write_bytes(content[: len(content) // 2])
    (folder / "pickled.safetensors").write_bytes(pickle.dumps(good))
    other.save(folder / "flipped")
    broken = bytearray((folder / "flipped" / "model.safetensors").read_bytes())
    broken[-1] ^= 1
    (folder / "flipped" / "model.safetensors").write_bytes(bytes(broken))
    (folder / "empty").mkdir()
    (folder / "sharded").mkdir()
    (folder / "sharded" / "part.safetensors").symlink_to(tmp_path / "outside.safetensors")
    index = {"weight_map": dict.fromkeys(good, "part.safetensors")}
    (folder / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index))
    expected, address = alone(served_model), serving(key="k", weights=folder)
    for body, status, why in (
        ({"path": "../outside.safetensors"}, 403, "below the folder of weights"),
        ({"path": "/etc/hostname"}, 403, "below the folder of weights"),
        ({"path": "link.safetensors"}, 403, "below the folder of weights"),
        ({"path": "sharded"}, 403, "below the folder of weights"),
        ({"path": "nothing"}, 400, "no such file"),
        ({"path": "empty"}, 400, "no such file"),
        ({"path": "a\0b"}, 400, "path"),
        ({"path": "missing.safetensors"}, 400, f"tensor '{last}' is missing"),
        ({"path": "more.safetensors"}, 400, "tensor 'another' does not belong"),
        ({"path": "shape.safetensors"}, 400, f"tensor '{last}' has shape [3, 5]"),
        ({"path": "nan.safetensors"}, 400, f"tensor '{last}' holds numbers that are not finite"),
        ({"path": "short.safetensors"}, 400, "damaged or not a safetensors file"),
        ({"path": "pickled.safetensors"}, 400, "damaged or not a safetensors file"),
        ({"path": "flipped"}, 400, "SHA-256 differs"),
        ({"file": "x"}, 400, "path"),
        ({}, 400, "path"),
    ):
        answer = put(address, body)
        message = answer.json()["error"]["message"]
        assert answer.status_code == status and why in message and "\n" not in message and str(tmp_path) not in message, (body, message)
        assert ask(address) == expected, body
    assert first != last and Client(address, "k")._model["updates"] == 0


def test_answers_that_were_begun_end_with_the_old_weights(
    served_model: FullBandModel, other: FullBandModel, scheduler: Scheduler, tmp_path: Path
) -> None:
    old, new = alone(served_model, "first"), alone(other, "second")
    heard: dict[str, queue.Queue[Event]] = {"first": queue.Queue(), "second": queue.Queue()}
    begun, go_on = threading.Event(), threading.Event()

    def emit(event: Event) -> None:
        heard["first"].put(event)
        begun.set()
        go_on.wait(30)

    scheduler.submit(Request(list(b"first"), GenerateOptions(max_new_tokens=20), emit))
    assert begun.wait(30)
    engine: Any = scheduler.engine
    change = scheduler.change(lambda: engine.put_weights(other.state_dict()))
    dropped = scheduler.change(lambda: pytest.fail("it was cancelled"))
    assert dropped.cancel() and not change.done()
    other.save(tmp_path / "other")
    with pytest.raises(TimeoutError):
        replace_weights(scheduler, engine, tmp_path, "other", 0.01)
    scheduler.submit(Request(list(b"second"), GenerateOptions(max_new_tokens=20), heard["second"].put))
    go_on.set()
    change.result(timeout=30)

    def text(name: str) -> str:
        found = ""
        while True:
            event = heard[name].get(timeout=30)
            found += event.text
            if event.finish_reason:
                return found

    assert (text("first"), text("second")) == (old, new)
    with pytest.raises(RuntimeError, match="out of memory"):
        scheduler.change(fail).result(timeout=30)
    scheduler.close(timeout=20)
    with pytest.raises(FullError, match="shutting down"):
        scheduler.change(lambda: None)


def fail() -> None:
    raise RuntimeError("out of memory")


def test_a_converted_model_whose_head_is_its_embedding(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from fullband.hf import attach

    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        shape = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = transformers.LlamaConfig(**shape, max_position_embeddings=32, tie_word_embeddings=True)
        return attach(transformers.LlamaForCausalLM(config), fusion="gated").eval()

    from fullband.serve.engine import LocalEngine

    model, other = make(0), make(1)
    other.progress.step += 3  # a trainer counts its steps in the model
    other.save_pretrained(tmp_path / "other")
    LocalEngine(model).put_weights(new_weights(model, tmp_path, "other"))
    tokens = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, other(tokens).logits) and int(model.progress.step) == 0


def test_the_command_needs_a_key_and_a_folder(served_model: FullBandModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FULLBAND_API_KEY", raising=False)
    served_model.save(tmp_path / "m")
    ByteTokenizer().save(tmp_path / "m")
    assert "needs a key" in refused("serve", tmp_path / "m", "--allow-weight-updates", tmp_path)
    assert "no such folder" in refused("serve", tmp_path / "m", "--allow-weight-updates", tmp_path / "x", "--key", "k")
    assert "use --engine own" in refused("serve", tmp_path / "m", "--allow-weight-updates", tmp_path, "--key", "k", "--engine", "vllm")
