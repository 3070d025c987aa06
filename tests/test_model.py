"""Saving and loading; what is no model, damaged or of another shape is refused in one line that names file and tensor."""

import json
import os

import pytest
import torch

from fullband import files, model
from fullband.model import FullBandModel, resolve_model_folder
from fullband.trunk.decoder import Decoder
from reference.seam import embed, run_trunk


@pytest.fixture
def saved(isometric_model, tmp_path):
    original = isometric_model().float()
    original.save(tmp_path / "m")
    return original, tmp_path / "m"


def refusal(folder, load=FullBandModel.load):
    with pytest.raises(ValueError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("fusion", ["gated", "concat", "add", "residual"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_round_trip(isometric_model, tmp_path, fusion, dtype):
    original = isometric_model(fusion).to(dtype)
    original.save(tmp_path / "deep" / "m")
    loaded = FullBandModel.load(tmp_path / "deep" / "m", dtype=dtype)
    assert not loaded.training and loaded.config == original.config
    assert loaded.state_dict().keys() == original.state_dict().keys()
    for name, tensor in original.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    tokens = torch.randint(23, (2, 7))
    with torch.no_grad():
        states = [run_trunk(m.trunk, embed(m.trunk, tokens))[0] for m in (original, loaded)]
    assert torch.equal(*states)
    assert torch.equal(loaded.trunk.head(states[0]), states[0] @ loaded.trunk.embedding.weight.T)
    assert {p.name for p in (tmp_path / "deep" / "m").iterdir()} == {"config.json", "model.safetensors", "manifest.json"}


def test_loading_converts(saved):
    _, folder = saved
    assert next(FullBandModel.load(folder).parameters()).dtype == torch.float32
    assert next(FullBandModel.load(folder, dtype=torch.bfloat16).parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_flipped_bit_anywhere_is_found(saved, name):
    _, folder = saved
    content = (folder / name).read_bytes()
    for place in (0, 9, len(content) // 2, len(content) - 2):
        damaged = bytearray(content)
        damaged[place] ^= 4
        (folder / name).write_bytes(bytes(damaged))
        assert refusal(folder).startswith(f"{folder / name}: damaged")
    (folder / name).write_bytes(content[: len(content) // 2])
    assert refusal(folder).startswith(f"{folder / name}: damaged")
    (folder / name).unlink()
    assert name in refusal(folder)


def test_without_a_manifest_damage_is_still_one_line(saved):
    _, folder = saved
    (folder / "manifest.json").unlink()
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-9])
    assert refusal(folder).startswith(f"{folder / 'model.safetensors'}: damaged or not a safetensors file")
    (folder / "model.safetensors").unlink()
    assert refusal(folder) == f"{folder / 'model.safetensors'}: no such file"
    for content, expected in (
        ("{", "not readable as JSON"),
        ("[]", "not a fullband model"),
        ('{"model_type": "llama"}', "a plain 'llama' checkpoint"),
    ):
        (folder / "config.json").write_text(content)
        assert expected in refusal(folder) and str(folder / "config.json") in refusal(folder)


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"trunk": {"layers": 4}}, "tensor 'trunk.blocks.3.attention.gate.weight' is missing"),
        ({"trunk": {"layers": 2}}, "tensor 'trunk.blocks.2.attention.gate.weight' does not belong to this model"),
        ({"trunk": {"vocab_size": 24}}, "tensor 'trunk.embedding.weight' has shape [23, 16], this model needs [24, 16]"),
        ({"connection": {"fusion": "add"}}, "tensor 'connection.mergers.0.gate.weight' does not belong to this model"),
        ({"trunk": {"widht": 24}}, "trunk.widht: unknown key; did you mean 'width'?"),
        (
            {"connection": {"fusion": "glued"}},
            "connection.fusion: must be 'gated', 'concat', 'add', 'residual' or 'recirculation', got 'glued'",
        ),
    ],
)
def test_another_shape_names_the_tensor(saved, change, expected):
    _, folder = saved
    config = json.loads((folder / "config.json").read_text())
    config["trunk"] |= change.pop("trunk", {})
    files.write_json(folder / "config.json", config | change)
    (folder / "manifest.json").unlink()
    message = refusal(folder)
    assert message.endswith(expected) and str(folder) in message


def test_folders_that_are_no_models(tmp_path):
    assert refusal(tmp_path / "none") == f"{tmp_path / 'none'}: no such model folder"
    assert refusal(tmp_path).startswith(f"{tmp_path}: not a model folder (it has no config.json)")
    (tmp_path / "file").write_text("x")
    assert refusal(tmp_path / "file").endswith("no such model folder")


def test_a_run_folder_stands_for_its_last_checkpoint(isometric_model, tmp_path):
    original = isometric_model().float()
    original.save(tmp_path / "checkpoints" / "step-00000007")
    pointer = tmp_path / "checkpoints" / "last.json"
    files.write_json(pointer, {"checkpoint": "step-00000007"})
    assert resolve_model_folder(str(tmp_path)) == tmp_path / "checkpoints" / "step-00000007"
    assert torch.equal(FullBandModel.load(tmp_path).trunk.embedding.weight, original.trunk.embedding.weight)
    for content in ("{", "[]", "{}", "3", '{"checkpoint": "step-00000008"}'):  # then the newest that is whole
        pointer.write_text(content)
        assert resolve_model_folder(tmp_path) == tmp_path / "checkpoints" / "step-00000007"


def test_kill_at_any_moment_leaves_a_model_that_loads(isometric_model, tmp_path, killed_while):
    """A folder that is saved again and again: between any two of its files a kill must not make it fail its own check."""
    original = isometric_model().float().requires_grad_(False)

    def work(i):
        for p in original.parameters():
            p.fill_(i)
        original.save(tmp_path)

    for _ in killed_while(work):
        values = torch.cat([p.detach().unique() for p in FullBandModel.load(tmp_path).parameters()])
        assert len(values.unique()) == 1


@pytest.mark.parametrize("failing", range(6))
def test_a_save_that_fails_at_any_step_leaves_a_model_that_loads(saved, monkeypatch, failing):
    """The same, one step after the other instead of by chance."""
    original, folder = saved
    with torch.no_grad():
        for p in original.parameters():
            p.fill_(7)
    calls = []

    def fails_in_time(real):
        def call(*args):
            calls.append(real)
            if len(calls) > failing:
                raise OSError(28, "No space left on device")
            return real(*args)

        return call

    with monkeypatch.context() as disk:
        disk.setattr(files.os, "replace", fails_in_time(os.replace))
        disk.setattr(files.os, "fsync", fails_in_time(os.fsync))
        with pytest.raises(OSError, match="No space left"):
            original.save(folder)
    values = set(FullBandModel.load(folder).trunk.embedding.weight.unique().tolist())
    assert (7.0 in values) == (len(values) == 1)
    original.save(folder)
    assert FullBandModel.load(folder).trunk.embedding.weight.unique().tolist() == [7]


def test_the_model_is_its_trunk_and_connection(isometric_model):
    built = isometric_model()
    assert isinstance(built.trunk, Decoder)
    owners = {name.split(".")[0] for name, _ in built.named_parameters()}
    assert owners == {"trunk", "connection"} and model.CONFIG == "config.json"
