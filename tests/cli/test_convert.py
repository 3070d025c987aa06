"""`fullband convert` and `detach`, and the other commands on what they make."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from cli.commands import Trained, fullband, refused
from fullband.model import FullBandModel
from hf.sources import widen_tokenizer, write_source


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("cli-hf") / "tiny")


@pytest.fixture(scope="module")
def gated(source: Path) -> Path:
    """Converted with a fusion that shows."""
    output = source.parent / "gated"
    assert fullband("convert", source, "-o", output, "--fusion", "gated").code == 0
    return output


def test_convert_says_what_it_made(source: Path, tmp_path: Path) -> None:
    done = fullband("convert", source, "-o", tmp_path / "out")
    assert done.code == 0, done.err
    for part in ("'llama' with the fusion 'residual'", "equals the source, bit for bit", "until it is, soft and fused equal standard"):
        assert part in done.out
    assert done.err == ""
    found = fullband("convert", source, "-o", tmp_path / "json", "--fusion", "gated", "--dtype", "bfloat16", "--json").json
    assert (found["kind"], found["fusion"], found["dtype"], found["trained"]) == ("llama", "gated", "bfloat16", False)
    assert found["fusion_parameters"] == 2 * 32 * 32


def test_detach_gives_the_weights_back(source: Path, gated: Path, tmp_path: Path) -> None:
    found = fullband("detach", gated, "-o", tmp_path / "again", "--json").json
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "again" / "model.safetensors")
    assert before.keys() == after.keys() and all(before[name].equal(after[name]) for name in before)
    assert found["kind"] == "llama" and found["parameters"] == sum(tensor.numel() for tensor in before.values())
    assert "a plain 'llama' model" in fullband("detach", gated, "-o", tmp_path / "more").out


def test_a_run_is_exported_and_read_again(text_run: Trained, tmp_path: Path) -> None:
    done = fullband("convert", text_run.folder, "-o", tmp_path / "out")
    assert done.code == 0 and "an App. A model with the fusion" in done.out and "not trained" not in done.out
    prompt = ["the quick", "--max-new-tokens", "12", "--json"]
    before, after = (fullband("generate", folder, *prompt).json["completions"] for folder in (text_run.folder, tmp_path / "out"))
    assert before == after
    FullBandModel.load(tmp_path / "out")


def test_generate_and_evaluate_a_converted_model(gated: Path, tmp_path: Path) -> None:
    texts = {
        mode: fullband("generate", gated, "hello", "--mode", mode, "--max-new-tokens", "20", "--json").json["completions"][0]["tokens"]
        for mode in ("standard", "soft", "fused")
    }
    assert texts["standard"][0] == texts["soft"][0]  # law 6
    assert len({tuple(text) for text in texts.values()}) == 3
    (tmp_path / "text.txt").write_text("some text to read " * 8, encoding="utf-8")
    rows = fullband("evaluate-loss", gated, "--text", tmp_path / "text.txt", "--feedback-passes", "0,1,exact", "--json").json["rows"]
    assert [row["feedback_passes"] for row in rows] == [0, 1, "exact"]
    assert rows[0]["loss"] != rows[1]["loss"]


def test_info_of_a_converted_model(gated: Path) -> None:
    model = fullband("info", gated, "--json").json["converted"]
    parts = model["parameters"]
    assert (model["family"], model["fusion"]) == ("llama", "gated")
    assert parts["fusion"] == 2 * 32 * 32 and parts["embedding"] == 264 * 32
    assert parts["total"] == sum(tensor.numel() for tensor in load_file(gated / "model.safetensors").values() if tensor.dim())
    out = fullband("info", gated).out
    assert "a converted 'llama' model" in out and "rest of the trunk" in out and "context 512" in out


def test_info_says_where_the_context_ends_with_feedback(gated: Path, tmp_path: Path) -> None:
    assert fullband("info", gated, "--json").json["converted"]["context_with_feedback"] == 512
    folder = tmp_path / "dynamic"
    shutil.copytree(gated, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["trunk_config"]["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert fullband("info", folder, "--json").json["converted"]["context_with_feedback"] == 511
    assert "context 512" in (out := fullband("info", folder).out) and "With latent feedback the context is 511" in out


def test_bad_input_is_one_line(source: Path, gated: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "nowhere/at/all: no such model folder" in refused("convert", "nowhere/at/all", "-o", out)
    assert f"{source.parent}: not a model folder" in refused("convert", source.parent, "-o", out)
    assert "--fusion: must be one of gated" in refused("convert", source, "-o", out, "--fusion", "sum")
    assert "--dtype: must be one of" in refused("convert", source, "-o", out, "--dtype", "int3")
    assert "is a full-bandwidth model already" in refused("convert", gated, "-o", out)
    assert "nowhere.txt: no such file" in refused("convert", source, "-o", out, "--calibrate", "nowhere.txt")
    assert f"{gated}: exists already; give another folder, or --force" in refused("convert", source, "-o", gated)
    assert "is a plain 'llama' checkpoint" in refused("detach", source, "-o", out)
    assert "convert it first: fullband convert" in refused("generate", source, "hello")
    assert "fixed buffers are for the built-in decoder" in refused("generate", gated, "hello", "--compile")
    assert not out.exists()


def test_another_models_tokenizer_is_refused(tmp_path: Path) -> None:
    widen_tokenizer(write_source(tmp_path / "src"), 300)
    line = refused("convert", tmp_path / "src", "-o", tmp_path / "out")
    assert "its tokenizer has 300 ids, the model's vocabulary only 264" in line


def test_a_missing_fusion_weight_is_one_line(source: Path, tmp_path: Path) -> None:
    fullband("convert", source, "-o", tmp_path / "out")
    (tmp_path / "out" / "manifest.json").unlink()
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    del tensors["connection.mergers.0.gate.weight"]
    save_file(tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    assert "weight 'connection.mergers.0.gate.weight' is missing" in refused("generate", tmp_path / "out", "hello")


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="the permission does not bind this user")
def test_a_folder_that_cannot_be_written(source: Path, tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert "cannot be written (Permission denied)" in refused("convert", source, "-o", tmp_path / "out")
    finally:
        tmp_path.chmod(stat.S_IRWXU)


def test_an_output_below_a_file_is_one_line(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be written (" in refused("convert", source, "-o", tmp_path / "file" / "out")
