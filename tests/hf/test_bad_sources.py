"""Checkpoints that cannot be converted, and tokenizers with more tokens than the model: one line that says why."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fullband.data import hub
from fullband.data.tokenizers import load_tokenizer
from fullband.decode import generate_text
from fullband.hf import convert as conversion
from fullband.hf.source import find_source
from fullband.loading import load_model
from hf.sources import VOCABULARY, byte_tokenizer, widen_tokenizer, write_source


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "tiny")


def refusal(source: Path) -> str:
    with pytest.raises(ValueError) as refused:
        conversion.convert(source, source.parent / "out")
    assert not (source.parent / "out").exists() and "\n" not in str(refused.value)
    return str(refused.value).replace(str(source), "tiny")


class Unknown:
    pass


def test_weights_that_need_unpickling(source: Path) -> None:
    (source / "model.safetensors").unlink()
    torch.save({"anything": Unknown()}, source / "pytorch_model.bin")
    assert refusal(source).startswith("tiny: its weights cannot be read: ")
    (source / "pytorch_model.bin").write_bytes(pickle.dumps(Unknown(), protocol=2))
    assert refusal(source).startswith("tiny: its weights cannot be read: ")
    (source / "pytorch_model.bin").write_bytes(b"")
    assert refusal(source).startswith("tiny: its weights cannot be read: ")


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "of-tomorrow"])
def test_quantised_weights_without_their_package(source: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("optimum", "gptqmodel", "autoawq", "awq", "bitsandbytes"):
        monkeypatch.setitem(sys.modules, package, None)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 128, "load_in_4bit": True}
    (source / "config.json").write_text(json.dumps(config))
    assert refusal(source).startswith("tiny: ")


@pytest.mark.parametrize(("value", "word"), [(float("nan"), "NaN"), (float("-inf"), "infinity")])
def test_a_weight_that_is_no_number_is_named(source: Path, value: float, word: str) -> None:
    weights = load_file(source / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    assert refusal(source) == (
        f"tiny: weight 'model.layers.1.mlp.up_proj.weight' holds {word}; the checkpoint is damaged, or its training diverged"
    )


def test_added_tokens_beyond_the_vocabulary_are_text(tmp_path: Path) -> None:
    """Gemma 3: <image_soft_token> has the first id that the text model does not have."""
    source = write_source(tmp_path / "tiny", tokenizer=byte_tokenizer(VOCABULARY + 2))
    before = (source / "tokenizer.json").read_bytes()
    conversion.convert(source, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == before
    tokenizer, model = load_tokenizer(tmp_path / "out"), load_model(tmp_path / "out")
    assert tokenizer.vocab_size == VOCABULARY
    text = "<|more_4|><|more_5|><|more_6|>"
    ids = tokenizer.encode(text)
    assert ids[0] == VOCABULARY - 1 and max(ids) < VOCABULARY and tokenizer.decode(ids) == text
    assert isinstance(generate_text(model, tokenizer, text, max_new_tokens=2).text, str)
    assert load_tokenizer(source).encode(text) == ids, "beside a plain checkpoint, as in training from it"


def test_another_models_tokenizer_is_still_refused(tmp_path: Path) -> None:
    source = write_source(tmp_path / "tiny")
    widen_tokenizer(source, 350)
    assert "its tokenizer has 350 ids, the model's vocabulary only 264: this is another model's tokenizer" in refusal(source)


def test_without_a_network_a_hub_name_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants as constants

    asked: list[Any] = []
    monkeypatch.setattr(hub.socket, "create_connection", lambda *address: asked.append(address) or (_ for _ in ()).throw(OSError("no")))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for name in (hub.OFFLINE, "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example")
    hub.check_hub.cache_clear()
    try:
        for _ in range(2):
            with pytest.raises(ValueError) as refused:
                find_source("someone/no-such-model")
            assert str(refused.value) == (
                "someone/no-such-model: no such folder, and the hub did not give it (no connection to hub.example; it is not in the cache)"
            )
        assert asked == [(("hub.example", 443), hub.PATIENCE)]
        assert constants.HF_HUB_OFFLINE, "the libraries are told"
    finally:
        hub.check_hub.cache_clear()


def test_a_hub_that_never_answers_costs_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    from threading import Event

    class Never:
        event = Event()

        def __call__(self, *address: Any) -> Any:
            self.event.wait(5)
            raise OSError

    never = Never()
    monkeypatch.setattr(hub, "PATIENCE", 0.05)
    monkeypatch.setattr(hub.socket, "create_connection", never)
    monkeypatch.setattr(hub, "getproxies", dict)
    assert not hub.can_connect("https://hub.example")
    never.event.set()


def test_a_proxy_is_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    monkeypatch.setattr(hub, "getproxies", lambda: {"https": f"http://127.0.0.1:{port}"})
    monkeypatch.setattr(hub, "proxy_bypass", lambda host: False)
    assert hub.can_connect("https://hub.invalid")
    listening.close()
    assert not hub.can_connect("https://hub.invalid")


def test_a_run_folder_is_its_newest_checkpoint(source: Path, tmp_path: Path) -> None:
    """A run that trained a converted model: `convert` refuses it in words, `detach` takes it."""
    run = tmp_path / "run"
    conversion.convert(source, run / "checkpoints" / "step-00000001")
    (run / "checkpoints" / "last.json").write_text(json.dumps({"checkpoint": "step-00000001"}))
    lm = conversion.detach_folder(run, tmp_path / "plain")
    assert lm.config.model_type == "llama" and load_tokenizer(run).vocab_size == 259
    assert load_file(tmp_path / "plain" / "model.safetensors").keys() == load_file(source / "model.safetensors").keys()
    assert "is a full-bandwidth model already" in refusal(run)
