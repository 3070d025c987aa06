"""load_model: whatever folder is named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fullband.config import TrunkConfig
from fullband.decode import generate
from fullband.hf import FullBandForCausalLM
from fullband.hf.convert import convert
from fullband.loading import is_standard_only, load_model
from fullband.model import FullBandModel
from hf.sources import tiny_llama, write_source
from reference.seam import read

TOKENS = torch.arange(40).view(2, 20)

STATE = "connection.mergers.0.state.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """native, run (whose checkpoint is native), source, converted."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    shape = TrunkConfig(vocab_size=257, width=16, layers=2, heads=2, kv_heads=1, glu_width=24, context=48, window=6, full_every=2)
    native = FullBandModel(shape)
    native.save(root / "native")
    native.save(root / "run" / "checkpoints" / "step-00000001")
    (root / "run" / "checkpoints" / "last.json").write_text('{"checkpoint": "step-00000001"}')
    write_source(root / "source")
    convert(root / "source", root / "converted", "gated")
    return root


@torch.no_grad()
def standard_logits(model: Any) -> torch.Tensor:
    return model.trunk.head(read(model, TOKENS))


@pytest.mark.parametrize("name", ["native", "run"])
def test_a_native_model_is_a_fullband_model(folders: Path, name: str) -> None:
    model = load_model(folders / name)
    assert isinstance(model, FullBandModel) and not model.training
    assert torch.equal(standard_logits(model), standard_logits(FullBandModel.load(folders / "native")))


def test_a_converted_model_is_one_of_transformers(folders: Path) -> None:
    model = load_model(folders / "converted", dtype=torch.float64)
    assert isinstance(model, FullBandForCausalLM) and not model.training and not is_standard_only(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    with torch.no_grad():
        assert torch.equal(standard_logits(model), tiny_llama().double()(TOKENS).logits)


def test_a_plain_checkpoint_is_refused_unless_it_is_asked_for(folders: Path) -> None:
    with pytest.raises(
        ValueError, match=r"a plain 'llama' checkpoint, without a fusion; convert it first: fullband convert .*source -o DIR"
    ):
        load_model(folders / "source")
    model = load_model(folders / "source", plain=True)
    assert is_standard_only(model) and model.config.latent_feedback_mode == "standard"
    with torch.no_grad():
        assert torch.equal(standard_logits(model), tiny_llama()(TOKENS).logits)
    texts = [generate(model, TOKENS, mode, max_new_tokens=8, stop_ids=()) for mode in ("standard", "soft")]
    assert texts[0] == texts[1]


def test_plain_takes_the_others_as_they_are(folders: Path) -> None:
    assert not is_standard_only(load_model(folders / "native", plain=True))
    assert not is_standard_only(load_model(folders / "converted", plain=True))


def test_weights_in_several_files(folders: Path, tmp_path: Path) -> None:
    for name in ("native", "converted"):
        whole = load_model(folders / name)
        exported = FullBandForCausalLM.from_pretrained(folders / name)
        exported.save_pretrained(tmp_path / name, max_shard_size="20KB")
        assert len(list((tmp_path / name).glob("*.safetensors"))) > 1
        assert torch.equal(standard_logits(load_model(tmp_path / name)), standard_logits(whole))


def edited(folder: Path, **fields: Any) -> None:
    (folder / "manifest.json").unlink(missing_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def without(folder: Path, weight: str) -> None:
    (folder / "manifest.json").unlink(missing_ok=True)
    tensors = load_file(folder / "model.safetensors")
    del tensors[weight]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        (
            "native",
            lambda folder: without(folder, "connection.mergers.0.state.weight"),
            "tensor 'connection.mergers.0.state.weight' is missing",
        ),
        (
            "converted",
            lambda folder: without(folder, "connection.mergers.0.state.weight"),
            "weight 'connection.mergers.0.state.weight' is missing",
        ),
        ("converted", lambda folder: edited(folder, connection={"fusion": "sum"}), "'sum'"),
        ("converted", lambda folder: edited(folder, model_type="quantum"), "a plain 'quantum' checkpoint"),
        ("converted", lambda folder: edited(folder, model_type=None), "not a fullband model"),
        ("converted", lambda folder: (folder / "config.json").write_text("[]"), "not a fullband model"),
        ("converted", lambda folder: (folder / "config.json").unlink(), "not a model folder"),
        ("converted", lambda folder: (folder / "model.safetensors").write_bytes(b"x"), "model.safetensors"),
    ],
)
def test_what_is_no_whole_model(folders: Path, tmp_path: Path, name: str, change: Any, expected: str) -> None:
    shutil.copytree(folders / name, tmp_path / "model")
    change(tmp_path / "model")
    with pytest.raises(ValueError) as refused:
        load_model(tmp_path / "model")
    assert expected in str(refused.value) and "\n" not in str(refused.value) and str(tmp_path) in str(refused.value)


def test_a_native_model_needs_no_transformers(folders: Path) -> None:
    code = f"import sys, fullband; fullband.load_model({str(folders / 'native')!r}); print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "False"
