"""The benchmarks run at toy sizes and write the keys they promise. Nothing here asserts a time."""

import json
from pathlib import Path

import pytest
from benchmarks.side_by_side import Timings

from benchmarks import attention, choices, entry, head, multipass, serve, train

FEW = ["--rounds", "1"]
RATIOS = {"one_pass_seconds", "reuse_two_pass", "naive_two_pass", "reuse_three_pass", "naive_three_pass", "extra_cost_left", "peak_memory"}


def written(tmp_path, run, arguments):
    path = tmp_path / "result.json"
    run([*arguments, *FEW, "--json", str(path)])
    result = json.loads(path.read_text())
    assert {"machine", "settings"} <= result.keys() and result["settings"]["seed"] == 0
    return result


def test_multipass(tmp_path):
    result = written(tmp_path, multipass.main, ["--preset", "tiny", "--length", "32", "48", "--tokens", "64", "--strata", "2"])
    assert result.keys() >= RATIOS
    assert result["lengths"].keys() == {"32", "48"} and all(each.keys() >= RATIOS for each in result["lengths"].values())
    assert result["reuse_two_pass"] == result["lengths"]["32"]["reuse_two_pass"]
    memory = result["peak_memory"]
    assert memory["one_pass_bytes"] > 0 and memory["reuse_two_pass"] < memory["naive_two_pass"] < memory["naive_three_pass"]


def test_entry(tmp_path):
    result = written(tmp_path, entry.main, ["--width", "64", "--length", "32"])
    assert result["target"] == 0.5 and 0 < result["pass"] < 2 and result["step"] > 0


def test_serve(tmp_path):
    result = written(tmp_path, serve.main, ["--preset", "tiny", "--rows", "3", "--new", "3", "--long-prompt", "20", "--prompt", "5"])
    assert result["ratios"].keys() == result["targets"].keys() and all(found["ratio"] > 0 for found in result["ratios"].values())


def test_train(tmp_path):
    pytest.importorskip("transformers")
    result = written(tmp_path, train.main, ["--preset", "tiny", "--rows", "2", "--length", "16"])
    assert result["one_pass"].keys() >= {"tokens_per_second", "throughput_ratio", "microbatch_seconds", "update_seconds"}
    assert result["llama"]["throughput_ratio"] == 1


def test_train_compares_equal_shapes():
    pytest.importorskip("transformers")
    shape = train.trunk_preset("tiny")
    llama = train.equal_shape_llama(shape, 16)
    ours = train.FullBandModel(shape).trunk
    own = sum(p.numel() for n, p in ours.named_parameters() if p.ndim == 2 and "attention.gate" not in n)
    assert own == sum(p.numel() for p in llama.parameters() if p.ndim == 2)


def test_head(tmp_path):
    result = written(tmp_path, head.main, ["--tokens", "64", "--vocabulary", "3000", "--width", "8", "--chunk-logits", "30000"])
    assert result["chunked"]["peak_bytes"] < result["plain"]["peak_bytes"]
    assert result["chunked"].keys() >= {"seconds", "peak_bytes", "time_ratio", "memory_ratio", "spread"}


def test_attention(tmp_path):
    result = written(tmp_path, attention.main, ["--length", "64", "--window", "16", "64", "--tile", "16", "32", "--head-dim", "8"])
    assert result["windows"].keys() == {"16", "64"} and result["windows"]["16"]["fastest_tile"] in (16, 32)


def test_choices(tmp_path):
    arguments = ["--preset", "tiny", "--context", "40", "--questions", "2", "--ending", "4"]
    result = written(tmp_path, choices.main, arguments)
    assert result["questions"].keys() == {"40 tokens, 0 passes", "40 tokens, 1 passes", "40 tokens, Soft"}
    for measured in result["questions"].values():
        assert measured["positions_ratio"] < 0.6 and measured["largest_difference"] < 1e-3


def test_ratio_is_of_minima():
    timings = Timings({"a": [2.0, 6.0], "b": [1.0, 2.0]})
    assert timings.ratio("a", "b") == 2 and timings.spread("a", "b")[1] == 2.5


@pytest.mark.parametrize("benchmark", [attention, choices, head, multipass, train])
def test_help_teaches(benchmark, capsys):
    with pytest.raises(SystemExit) as stop:
        benchmark.main(["--help"])
    assert stop.value.code == 0 and benchmark.__doc__.splitlines()[0] in capsys.readouterr().out


@pytest.mark.slow
def test_the_gpu_check_on_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All that a CPU can check, but the compiled blocks (a minute); and it sees a path that computes something else."""
    from benchmarks import gpu

    monkeypatch.setattr(gpu, "compiled_losses", gpu.training_losses)
    found = gpu.main(["--device", "cpu", "--only", "checks", "--json", str(tmp_path / "gpu.json")])
    assert all(check["good"] for check in found["checks"]) and sum(check["error"] is not None for check in found["checks"]) == 7
    assert len(json.loads((tmp_path / "gpu.json").read_text())["checks"]) == 9
    monkeypatch.setattr(gpu, "make_plan", lambda queries, keys, window, *others: gpu.dense_plan(queries, keys, 90, *others))
    monkeypatch.setattr(gpu, "differing", lambda device, **settings: 1 / 0)
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--device", "cpu", "--only", "checks", "--json", str(tmp_path / "gpu.json")])
    assert ended.value.code == 1
    good = [check["good"] for check in json.loads((tmp_path / "gpu.json").read_text())["checks"]]
    assert good == [False, False, True, True, True, False, False, True, True]
