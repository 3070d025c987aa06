"""The benchmarks of decoding run at toy sizes and write the keys they promise. Nothing here asserts a time."""

import json

import pytest
import torch

from benchmarks import converged, decode, speculate
from fullband.data.tokenizers import ByteTokenizer
from fullband.model import FullBandModel


def written(tmp_path, run, arguments):
    path = tmp_path / "result.json"
    run([*arguments, "--rounds", "1", "--json", str(path)])
    result = json.loads(path.read_text())
    assert {"machine", "settings", "targets"} <= result.keys() and result["settings"]["seed"] == 0
    return result


@pytest.fixture
def byte_model(tmp_path, trunk_config):
    torch.manual_seed(0)
    FullBandModel(trunk_config(vocab_size=257, context=128, window=16)).save(tmp_path / "model")
    ByteTokenizer().save(tmp_path / "model")
    return str(tmp_path / "model")


def test_decode(tmp_path):
    pytest.importorskip("transformers")
    arguments = ["--preset", "tiny", "--batch", "1", "2", "--prompt", "4", "--new", "3", "--long-prompt", "16"]
    measured = written(tmp_path, decode.main, arguments)["presets"]["tiny"]
    assert measured["soft_over_standard"].keys() >= {"ratio", "spread", "fusion_share", "target"}
    assert measured["first_token"].keys() >= {"ratio", "fused_seconds", "standard_seconds"}
    assert measured["batches"].keys() == {"1", "2"}
    ways = measured["batches"]["2"]
    assert ways.keys() >= {"transformers", "generate", "static", "static_bf16", "bound", "bandwidth_bytes_per_second"}
    assert ways["static"].keys() == {"tokens_per_second", "of_transformers", "spread", "of_bound"}
    assert ways["transformers"]["of_transformers"] == ways["bound"]["of_bound"] == 1
    assert ways["bytes"]["static"] == 2 * ways["bytes"]["static_bf16"]


def test_converged(tmp_path, byte_model):
    arguments = ["--model", byte_model, "--length", "8", "24", "999", "--texts", "1", "--tolerance", "0.01", "--whole-passes", "30"]
    result = written(tmp_path, converged.main, arguments)
    assert result["lengths"].keys() == {"8", "24"}  # 999 exceeds the context
    for length, ways in result["lengths"].items():
        assert ways.keys() == {"exact", "whole to 1e-3", "converged 0.01", "whole like 0.01"}
        assert ways["exact"]["passes"] == int(length) and ways["exact"]["worst_error"] == 0
        assert ways["whole to 1e-3"]["worst_error"] <= 1e-3 and ways["whole to 1e-3"]["passes"] <= int(length)


def test_speculate(tmp_path, byte_model):
    arguments = ["--model", byte_model, "--texts", "2", "--prompt", "40", "--new", "12", "--draft", "3", "--tolerance", "0"]
    result = written(tmp_path, speculate.main, arguments)
    (tried,) = result["settings_tried"].values()
    assert tried.keys() >= {"acceptance_length", "positions_per_token", "passes_per_token", "speed_up", "mismatches"}
    assert tried["mismatches"] == 0 and result["plain_tokens_per_second"] > 0


@pytest.mark.parametrize("benchmark", [converged, decode, speculate])
def test_help_teaches(benchmark, capsys):
    with pytest.raises(SystemExit) as stop:
        benchmark.main(["--help"])
    assert stop.value.code == 0 and benchmark.__doc__.splitlines()[0] in capsys.readouterr().out
