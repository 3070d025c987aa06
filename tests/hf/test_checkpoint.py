"""Folders: saved, loaded, loaded in a process that knows nothing of fullband yet, and refused in one line where they are damaged."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import fullband.decode as decode
from fullband.files import MANIFEST, write_json, write_manifest
from fullband.hf import FullBandConfig, FullBandForCausalLM, attach
from fullband.hf.source import find_source, load_source
from fullband.loading import load_model
from fullband.model import FullBandModel
from hf.models import NATIVE, PADDED, PROMPTS, make, shared
from hf.sources import byte_tokenizer, plain_model, write_source
from reference.seam import read

WEIGHTS = "model.safetensors"

GATE = "connection.mergers.0.gate.weight"


def same_weights(one: Any, other: Any) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key].double(), b[key].double()) for key in a)


@pytest.mark.parametrize(
    "family, shards",
    [("llama", True), ("gemma3_text", False), ("falcon_h1", False), ("qwen3_moe", True), ("native", False), ("native", True)],
)
def test_a_model_comes_back_from_its_folder(family: str, shards: bool, tmp_path: Path) -> None:
    model = shared(family)
    model.save_pretrained(tmp_path, **({"max_shard_size": "5KB"} if shards else {}))
    assert (tmp_path / WEIGHTS).is_file() != shards
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager")  # the others take no float64
    assert type(loaded) is FullBandForCausalLM and not loaded.training
    assert same_weights(model, loaded)
    tokens = PADDED[1:, :3]
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    if family != "native":
        assert loaded.trunk.embedding_scale == model.trunk.embedding_scale != 1
        assert loaded.config.trunk_config._attn_implementation == model.config.trunk_config._attn_implementation == "sdpa"
    loaded.config.feedback_passes = 1
    assert torch.equal(loaded(tokens).logits, model.trunk.head(read(model, tokens, 1)))


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path: Path) -> None:
    model = make("llama")
    lm = model.trunk.lm
    lm.config.tie_word_embeddings = model.config.trunk_config.tie_word_embeddings = model.config.tie_word_embeddings = True
    lm.tie_weights()
    model = FullBandForCausalLM(model.config, lm=lm).double()
    model.save_pretrained(tmp_path)
    assert "trunk.lm.lm_head.weight" not in load_file(tmp_path / WEIGHTS)
    loaded = FullBandForCausalLM.from_pretrained(tmp_path)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert torch.equal(loaded(PADDED).logits, model(PADDED).logits)


def test_loaded_weights_lie_in_memory_as_constructed_ones(tmp_path: Path) -> None:
    """Each starts on 64 bytes: mapped as they stand in the file, they would make other roundings on some processors."""

    def misaligned(model: Any) -> int:
        return sum(tensor.data_ptr() % 64 != 0 for tensor in (*model.parameters(), *model.buffers()))

    write_source(tmp_path / "source")
    assert misaligned(AutoModelForCausalLM.from_pretrained(tmp_path / "source"))  # as transformers leaves them
    source = load_source(find_source(tmp_path / "source"))
    attach(source).save_pretrained(tmp_path / "converted")
    loaded = FullBandForCausalLM.from_pretrained(tmp_path / "converted")
    for model in (source, loaded):
        assert not misaligned(model)
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight  # tied, and still one tensor
    tokens = torch.arange(60).view(2, 30)
    with torch.no_grad():
        expected = source(tokens).logits
        assert torch.equal(loaded(tokens).logits, expected) and torch.equal(plain_model(tmp_path / "source")(tokens).logits, expected)


def test_dtype_and_attention_are_chosen_when_loading(tmp_path: Path) -> None:
    shared("llama").save_pretrained(tmp_path)
    half = FullBandForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager")
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert half.trunk.embedding_scale.dtype == torch.float32 and half.trunk.embedding_scale == shared("llama").trunk.embedding_scale
    assert half.config._attn_implementation == half.trunk.lm.config._attn_implementation == "eager"


def test_device_maps_and_what_they_cannot_offload(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    shared("llama").save_pretrained(tmp_path)
    expected = decode.generate(shared("llama"), PROMPTS, "soft", max_new_tokens=2)
    for device_map in ("auto", {"": "cpu"}):
        placed = FullBandForCausalLM.from_pretrained(tmp_path, device_map=device_map)
        assert same_weights(placed, shared("llama"))
        assert decode.generate(placed, PROMPTS, "soft", max_new_tokens=2) == expected
    parts = ("trunk.embedding_scale", "trunk.lm.model.embed_tokens", "trunk.lm.model.layers.0", "trunk.lm.model.layers.1")
    everywhere = dict.fromkeys(
        (*parts, "trunk.lm.model.norm", "trunk.lm.model.rotary_emb", "trunk.lm.lm_head", "connection", "progress"), "cpu"
    )
    options = dict(offload_folder=tmp_path / "offloaded", dtype=torch.float64)
    spread = FullBandForCausalLM.from_pretrained(tmp_path, device_map=everywhere | {parts[-1]: "disk"}, **options)
    assert next(spread.trunk.lm.model.layers[1].parameters()).device.type == "meta"
    made = spread.generate(torch.tensor(PROMPTS[1:]), max_new_tokens=2, do_sample=False, eos_token_id=None)
    assert made[0, len(PROMPTS[1]) :].tolist() == expected[1].tokens
    for part, name in (("trunk.lm.lm_head", "head"), ("connection", "fusion")):
        with pytest.raises(ValueError, match=f"device_map: the {name} cannot be offloaded"):
            FullBandForCausalLM.from_pretrained(tmp_path, device_map=everywhere | {part: "disk"}, **options)
    for device_map in ("auto", {"": "cpu"}, {"trunk": "cpu", "connection": "cpu", "progress": "cpu"}):
        placed = FullBandForCausalLM.from_pretrained(tmp_path, device_map=device_map)
        assert same_weights(placed, shared("llama"))
        assert decode.generate(placed, PROMPTS, "soft", max_new_tokens=2) == decode.generate(
            shared("llama"), PROMPTS, "soft", max_new_tokens=2
        )


def test_native_folders_are_the_same_format_both_ways(isometric_model: Callable[..., FullBandModel], tmp_path: Path) -> None:
    model = isometric_model(**NATIVE)
    model.save(tmp_path / "ours")
    theirs = FullBandForCausalLM.from_pretrained(tmp_path / "ours")
    assert all(torch.equal(theirs.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert decode.generate(theirs, PROMPTS, "fused", max_new_tokens=3) == decode.generate(model, PROMPTS, "fused", max_new_tokens=3)
    for folder, options in ((tmp_path / "one", {}), (tmp_path / "many", {"max_shard_size": "3KB"})):
        theirs.save_pretrained(folder, **options)
        again = FullBandModel.load(folder, dtype=torch.float64)
        assert same_weights(model, again) and again.config == model.config


@torch.no_grad()
def test_an_exported_model_mixes_streams_as_it_did(isometric_model: Callable[..., FullBandModel], tmp_path: Path) -> None:
    """Streams below the top are normed before they are carried, with the trunk's own epsilon."""
    shape = NATIVE | {"norm_eps": 0.3}
    model, tokens = isometric_model(source="middle", **shape), torch.tensor([PROMPTS[0]])
    model.config = model.config.model_copy(update={"feedback_passes": 2})
    model.save(tmp_path / "ours")
    theirs = FullBandForCausalLM.from_pretrained(tmp_path / "ours")
    assert theirs.config.feedback_passes == 2 and torch.equal(theirs(tokens).states, model(tokens).states)
    model.connection.eps = 1e-6
    assert not torch.allclose(theirs(tokens).states, model(tokens).states, atol=1e-4)


def test_an_edited_entry_is_checked_when_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that the stack can't be cut for, written into the config by hand."""
    make("llama").save_pretrained(tmp_path)
    (tmp_path / MANIFEST).unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", config | {"connection": config["connection"] | {"entry": 1}})
    assert FullBandForCausalLM.from_pretrained(tmp_path).connection.entries == (1,)
    left: list[torch.Tensor] = []
    forward = LlamaDecoderLayer.forward

    def leaning(layer: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The second layer looks at what the first one left."""
        index = layer.self_attn.layer_idx
        output = forward(layer, hidden * (1 + left.pop()) if index == 1 and left else hidden, *args, **kwargs)
        if index == 0:
            left.append(hidden.mean())
        return output

    monkeypatch.setattr(LlamaDecoderLayer, "forward", leaning)
    with pytest.raises(ValueError, match="'llama' cannot be connected so: its layers below depth 1 cannot be left out"):
        FullBandForCausalLM.from_pretrained(tmp_path)


def make_older(folder: Path) -> None:
    """Rewrites a saved model as it was saved before connections: older keys in config.json, older names of the weights."""

    def older(text: str) -> str:
        return text.replace("connection.mergers.0.", "fusion.").replace("connection.mix", "trunk.fed_back.mix")

    (folder / MANIFEST).unlink()
    config = json.loads((folder / "config.json").read_text())
    connection = config.pop("connection")
    config["fusion"] = connection["fusion"]
    if config.get("trunk"):
        config["trunk"]["fed_back"] = connection["source"]
    write_json(folder / "config.json", config)
    for path in folder.glob("model*.safetensors"):
        save_file({older(name): tensor for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
    for index in folder.glob("*.index.json"):
        index.write_text(older(index.read_text()))


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize(
    "family, fusion, source",
    [
        ("native", "gated", "top"),
        ("native", "residual", "mix"),
        ("native", "concat", "top"),
        ("llama", "residual", "top"),
        ("qwen3_moe", "add", "top"),
    ],
)
def test_a_model_saved_before_connections_loads(family: str, fusion: str, source: str, shards: bool, tmp_path: Path) -> None:
    """As it was, and what is saved of it has today's names."""
    model = make(family, fusion, connection={"source": source}, feedback_passes=2)
    model.save_pretrained(tmp_path / "old", **({"max_shard_size": "5KB"} if shards else {}))
    names = {name for path in (tmp_path / "old").glob("model*.safetensors") for name in load_file(path)}
    make_older(tmp_path / "old")
    loaded, found = FullBandForCausalLM.from_pretrained(tmp_path / "old", output_loading_info=True, experts_implementation="eager")
    assert not any(found.values()) and loaded.config.connection == model.config.connection
    expected = model(PADDED[1:]).logits
    assert torch.equal(loaded(PADDED[1:]).logits, expected)
    loaded.save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / "again" / WEIGHTS).keys() == names
    assert {"connection", "fusion"} & json.loads((tmp_path / "again" / "config.json").read_text()).keys() == {"connection"}
    for folder in ("old", "again"):
        ours: Any = load_model(tmp_path / folder, dtype=torch.float64)
        if family == "native":
            assert type(ours) is FullBandModel and ours.config.connection.model_dump() == model.config.connection
            assert torch.equal(ours.trunk.head(read(ours, PADDED[1:], 2)), expected)
        assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in ours.state_dict().items())


def test_a_mapping_of_names_that_is_given_is_kept_beside_ours(tmp_path: Path) -> None:
    model = make("native")
    model.save_pretrained(tmp_path)
    make_older(tmp_path)
    tensors = {name.replace("final_norm", "last_norm"): tensor for name, tensor in load_file(tmp_path / WEIGHTS).items()}
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    assert same_weights(FullBandForCausalLM.from_pretrained(tmp_path, key_mapping={r"last_norm": "final_norm"}), model)


def test_weights_under_older_names_are_loaded_as_trainers_load_them() -> None:
    """`strict=False`: transformers' trainer resumes so, and only logs what it leaves out."""
    model = make("native", "gated", connection={"source": "mix"})
    fresh = FullBandForCausalLM(model.config)
    older = {
        name.replace("connection.mergers.0.", "fusion.").replace("connection.mix", "trunk.fed_back.mix"): tensor
        for name, tensor in model.state_dict().items()
    }
    found = fresh.double().load_state_dict(older, strict=False)
    assert not found.missing_keys and not found.unexpected_keys and same_weights(fresh, model)
    assert any(name.startswith("fusion.") for name in older), "what was given was changed"


def test_steps_of_a_trainer_are_saved_once_there_are_any(tmp_path: Path) -> None:
    model = make("native")
    model.save_pretrained(tmp_path)
    assert "progress.step" not in load_file(tmp_path / WEIGHTS)
    assert int(FullBandForCausalLM.from_pretrained(tmp_path).progress.step) == 0
    model.progress.step += 7
    model.save_pretrained(tmp_path)
    assert int(FullBandForCausalLM.from_pretrained(tmp_path).progress.step) == 7
    FullBandModel.load(tmp_path)


def test_generation_config_is_saved(tmp_path: Path) -> None:
    model = make("native")
    model.generation_config.latent_feedback_mode, model.generation_config.feedback_passes = "fused", "exact"
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["latent_feedback_mode"] == "fused"
    assert FullBandForCausalLM.from_pretrained(tmp_path).decoding_mode() == ("fused", "exact")


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / MANIFEST).unlink()


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing fusion": (lambda f: rewrite(f, lambda t: t.pop(GATE)), f"'{GATE}' is missing"),
    "missing trunk": (lambda f: rewrite(f, lambda t: t.pop("trunk.lm.model.norm.weight")), "'trunk.lm.model.norm.weight' is missing"),
    "missing scale": (lambda f: rewrite(f, lambda t: t.pop("trunk.embedding_scale")), "'trunk.embedding_scale' is missing"),
    "foreign": (lambda f: rewrite(f, lambda t: t.update(extra=torch.zeros(1))), "'extra' does not belong"),
    "shape": (lambda f: rewrite(f, lambda t: t.update({GATE: torch.zeros(3, 3)})), GATE),
    "flipped bit": (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-1] + b"\x01"), "SHA-256"),
    "cut off": (lambda f: ((f / MANIFEST).unlink(), (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-9])), "cannot be read"),
    "no config": (lambda f: ((f / MANIFEST).unlink(), (f / "config.json").write_text("{")), "config.json"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_damaged_folder_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    shared("llama").save_pretrained(tmp_path)
    change, message = CHANGES[name]
    change(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        FullBandForCausalLM.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_a_bad_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fusion: 'other' is none of"):
        FullBandConfig(trunk=NATIVE, fusion="other")
    with pytest.raises(ValueError, match="give trunk or trunk_config"):
        FullBandConfig()
    with pytest.raises(ValueError, match="not both"):
        FullBandConfig(trunk=NATIVE, trunk_config=shared("llama").config.trunk_config)
    write_json(tmp_path / "config.json", {"model_type": "fullband", "trunk": NATIVE | {"widht": 3}, "fusion": "gated"})
    with pytest.raises(ValueError, match="widht"):
        FullBandForCausalLM(AutoConfig.from_pretrained(tmp_path))


def test_saving_again_replaces_other_shards_and_keeps_the_rest(tmp_path: Path) -> None:
    model = make("native")
    (tmp_path / "README.md").write_text("mine")
    for size in ("3KB", "50GB", "6KB"):
        model.save_pretrained(tmp_path, max_shard_size=size)
        assert same_weights(FullBandForCausalLM.from_pretrained(tmp_path), model)
    assert not (tmp_path / WEIGHTS).exists() and not list(tmp_path.glob(".partial*"))
    assert (tmp_path / "README.md").read_text() == "mine"
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        model.save_pretrained(tmp_path / "file")


@pytest.mark.slow
def test_a_kill_never_leaves_a_mixture(killed_while: Callable[[Callable[[int], None]], Iterator[None]], tmp_path: Path) -> None:
    model = make("native")

    def save(number: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(number % 7)
        model.save_pretrained(tmp_path, max_shard_size="12KB")

    for _ in killed_while(save):
        try:
            loaded = FullBandForCausalLM.from_pretrained(tmp_path)
        except ValueError as error:
            assert "SHA-256" in str(error) or "listed in" in str(error)
            continue
        assert len({float(value) for parameter in loaded.parameters() for value in parameter.flatten()}) == 1
    model.save_pretrained(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


LOADS = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
assert not any(name.startswith("fullband") for name in sys.modules)
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__ == "fullband.hf.model"
    print(model(torch.arange(8)[None]).logits.double().sum().item())
    pipe = pipeline("text-generation", model=folder, trust_remote_code=True)
    for mode in ("standard", "soft", "fused"):
        made = pipe("Once", latent_feedback_mode=mode, max_new_tokens=4, do_sample=False, eos_token_id=None, return_tensors=True)
        print(mode, made[0]["generated_token_ids"][-4:])
    chat = pipe([{"role": "user", "content": "Hi"}], max_new_tokens=3)
    assert chat[0]["generated_text"][-1]["role"] == "assistant"
    model.save_pretrained(folder + "-again")
"""


@pytest.mark.slow
def test_the_folder_alone_is_enough_in_a_new_process(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    models = {"native": make("native", shape=dict(vocab_size=264)), "converted": make("llama", shape=dict(vocab_size=264))}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    folders = [str(tmp_path / name) for name in models]
    done = subprocess.run([sys.executable, "-c", LOADS, *folders], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = iter(done.stdout.splitlines())
    prompt = tokenizer("Once").input_ids
    for name, model in models.items():
        assert float(next(lines)) == pytest.approx(model(torch.arange(8)[None]).logits.double().sum().item(), rel=1e-9)
        for mode in ("standard", "soft", "fused"):
            assert next(lines) == f"{mode} {decode.generate(model, [prompt], mode, max_new_tokens=4)[0].tokens}"
        again = tmp_path / f"{name}-again"
        assert {path.name for path in again.iterdir() if path.suffix == ".py"} == {"modeling_fullband.py"}
        assert json.loads((again / "config.json").read_text()) == json.loads((tmp_path / name / "config.json").read_text())


@pytest.mark.slow
def test_where_fullband_is_missing_one_line_says_so(tmp_path: Path) -> None:
    make("native").save_pretrained(tmp_path)
    code = f"""
import sys
sys.modules["fullband"] = None
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, trust_remote_code=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stderr.strip().splitlines()[-1].startswith("ModuleNotFoundError: this model needs the package fullband (pip install")


def test_a_whole_folder_with_an_old_manifest_is_refused(tmp_path: Path) -> None:
    make("native").save_pretrained(tmp_path)
    write_manifest(tmp_path, ["config.json", WEIGHTS])
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text() + " ")
    with pytest.raises(ValueError, match=r"config\.json: damaged"):
        FullBandForCausalLM.from_pretrained(tmp_path)
