"""Hugging Face models in training: converted at the start, grouped, frozen, resumed, checkpointed, in bfloat16."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from fullband.cli.train import plan_of
from fullband.config import Recipe
from fullband.data.tokenizers import load_tokenizer
from fullband.feedback.multipass import multipass_reference
from fullband.files import read_tensors
from fullband.optim.groups import parameter_groups
from fullband.training import train
from fullband.training.metrics import read_metrics
from fullband.training.run import prepare
from training.runs import StopAt, assert_same_run, last_of, with_changes

MakeRecipe = Callable[..., Recipe]
SHAPE: dict[str, Any] = {
    "vocab_size": 261, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_ff_dim": 64},
}

MAPS = {  # of each family, as regular expressions of names: what NorMuon takes besides the fusion
    "llama": "(q|k|v|o|gate|up|down)_proj",
    "gpt2": "none: its maps are stored the other way round",
    "gpt_neox": "query_key_value|dense|dense_h_to_4h|dense_4h_to_h",
    "qwen3_moe": "(q|k|v|o)_proj",  # experts are stacked, and a router has one output an expert
    "lfm2": "(q|k|v|out|in)_proj|w1|w2|w3",
}


def source_of(family: str, folder: Path) -> Path:
    """A folder of a tiny model with a byte-level tokenizer, as the hub has them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(SHAPE | FAMILIES[family]))).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return source_of("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def converted(recipe: MakeRecipe, jsonl: str, llama: Path) -> MakeRecipe:
    """Fine-tuning of the tiny Llama on packed text: plain steps, two passes, three."""

    def make(output: str = "run", **overrides: Any) -> Recipe:
        options: dict[str, Any] = {
            "model": {"source": str(llama)},
            "data": {"source": {"kind": "files", "paths": [jsonl], "validation_fraction": 0.2}, "length": 24, "shuffle_documents": 8},
            "feedback": {"schedule": [{"fraction": 0.25, "passes": {1: 1.0}}, {"fraction": 0.75, "passes": {2: 0.5, 3: 0.5}}]},
            "optim": {"kind": "adam", "warmup_steps": 2, "adam_lr": 1e-2},
            "train": {"steps": 8, "batch_rows": 2, "log_every": 1, "checkpoint_every": 2, "device": "cpu"},
            "evaluation": {"every": 4, "rows": 2, "batch_rows": 2, "feedback_passes": [0, 1]},
        }
        return recipe(output, **(options | overrides))

    return make


def entries(recipe: Recipe) -> list[dict[str, Any]]:
    return [entry for entry in read_metrics(Path(recipe.output or "") / "metrics.jsonl") if "objective" in entry]


def test_a_hugging_face_model_is_converted_at_the_start(converted: MakeRecipe, llama: Path) -> None:
    run = prepare(converted(), resume=False)
    source = LlamaForCausalLM.from_pretrained(llama)
    for name, tensor in source.state_dict().items():
        assert torch.equal(run.model.trunk.lm.state_dict()[name], tensor), name
    assert run.loader.tokenizer.name == load_tokenizer(llama).name
    assert run.model.config.connected.fusion == "residual" and run.model.training


def test_the_fused_input_is_scaled_to_the_training_text(converted: MakeRecipe, llama: Path) -> None:
    """Over the tokens of the first batch, which the run then reads all the same."""
    run = prepare(converted(), resume=False)
    embeddings = LlamaForCausalLM.from_pretrained(llama).get_input_embeddings().weight
    tokens = run.loader.next_batch().tokens
    embeddings = embeddings.detach()
    assert float(run.model.trunk.embedding_scale) == pytest.approx(float(embeddings[tokens].square().mean().sqrt()), rel=1e-5)
    assert float(run.model.trunk.embedding_scale) != pytest.approx(float(embeddings.square().mean().sqrt()), rel=1e-5)


def test_training_starts_without_a_shock_and_resumes_bit_for_bit(converted: MakeRecipe) -> None:
    """Law 8 on a Hugging Face trunk, resumed twice; the source is not needed for it."""
    straight, broken = converted("straight"), converted("broken")
    result = train(straight)
    assert result.milestones.shock == pytest.approx(0, abs=1e-6)
    assert {entry["passes"] for entry in entries(straight)} == {1, 2, 3}
    assert set(result.validation) == {"0", "1"}
    for steps in (2, 6):
        train(with_changes(broken, train__steps=8), resume=steps > 2, watcher=StopAt(steps))
    train(with_changes(broken, model__source=broken.model.source), resume=True)
    assert_same_run(straight.output or "", broken.output or "")


def test_a_checkpoint_is_a_model_folder_that_training_can_start_from(converted: MakeRecipe) -> None:
    first = converted("first", train__steps=4)
    train(first)
    trained = read_tensors(last_of(first.output or "") / "model.safetensors")
    for key, value in (("model", {"source": first.output}), ("train__initial_checkpoint", first.output)):
        options = {"model": {}} if key == "train__initial_checkpoint" else {}
        run = prepare(converted(f"second-{key}", **options, **{key: value}), resume=False)
        state = run.model.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in trained.items())
        assert run.loader.tokenizer.name == load_tokenizer(last_of(first.output or "")).name
    with pytest.raises(ValueError, match=r"its fusion is residual, the recipe's gated"):
        prepare(converted("third", model={"source": first.output, "fusion": "gated"}), resume=False)


@pytest.mark.parametrize("kind", ["adam", "normuon"])
def test_fusion_warmup_freezes_the_trunk(converted: MakeRecipe, kind: str) -> None:
    config = converted(
        feedback={"schedule": [{"fraction": 1.0, "passes": {2: 1.0}}], "fusion_warmup": 2, "loss_weight_ramp": 4},
        optim={"kind": kind, "warmup_steps": 0, "adam_lr": 1e-2},
        train={"steps": 4, "batch_rows": 2, "log_every": 1, "checkpoint_every": 1, "keep_checkpoints": 9, "device": "cpu"},
        model={"source": converted().model.source, "fusion": "gated"},
    )
    train(config)
    at = [read_tensors(Path(config.output or "") / "checkpoints" / f"step-{n:08d}" / "model.safetensors") for n in (1, 2, 3)]
    moved = [{name for name in a if not torch.equal(a[name], b[name])} for a, b in pairwise(at)]
    assert moved[0] == {"connection.mergers.0.state.weight", "connection.mergers.0.gate.weight"}
    assert len(moved[1]) > 15
    assert [entry["loss_weight"] for entry in entries(config)] == [0.25, 0.5, 0.75, 1.0]


def test_activation_checkpointing_reads_whole_rows_and_says_so(converted: MakeRecipe) -> None:
    plain = converted("plain", feedback={"schedule": "three-pass"})
    stored = converted("stored", feedback={"schedule": "three-pass"}, train={**plain.train.model_dump(), "activation_checkpointing": True})
    with pytest.warns(UserWarning, match="without prefix reuse"):
        train(stored)
    train(plain)
    for one, other in zip(entries(plain), entries(stored), strict=True):
        assert one["objective"] == pytest.approx(other["objective"], rel=1e-4)
        assert one["executed_positions"] < other["executed_positions"] == other["token_equivalent_compute"]


def test_activation_checkpointing_with_several_entries_is_refused_before_the_first_step(converted: MakeRecipe) -> None:
    """Not where feedback begins."""
    feedback = {"schedule": "three-pass", "connection": {"entry": [0, 1]}}
    config = converted(feedback=feedback, train={**converted().train.model_dump(), "activation_checkpointing": True})
    for start in (plan_of, train):
        with pytest.raises(ValueError, match=r"train\.activation_checkpointing: must be false where states enter"):
            start(config)
    assert not (Path(config.output or "") / "metrics.jsonl").exists()


def test_bfloat16_trains(converted: MakeRecipe) -> None:
    config = converted(train={**converted().train.model_dump(), "dtype": "bfloat16"})
    losses = [entry["loss_pass_1"] for entry in entries(config)] if train(config) else []
    assert losses[-1] < losses[0]
    assert all(tensor.dtype == torch.float32 for tensor in read_tensors(last_of(config.output or "") / "model.safetensors").values())


@pytest.mark.parametrize("packing", [True, False])
def test_instruction_tuning_of_a_source(converted: MakeRecipe, tmp_path: Path, packing: bool) -> None:
    """Chat data in ChatML, which the tokenizer has ids for; law 3 under the mask of prompts, through the trainer."""
    rows = [{"q": f"{i}", "a": "ab" * (i % 4)} for i in range(20)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    source = {"kind": "chat", "paths": [str(tmp_path / "chat.jsonl")], "prompt_field": "q", "completion_field": "a"}
    options: dict[str, Any] = {"data": {"source": source, "length": 60, "packing": packing}, "train__steps": 2}
    config = converted(**options, feedback={"schedule": "three-pass", "prefix": "answer"}, evaluation={"rows": 0})
    naive = converted("naive", **options, feedback={"schedule": "three-pass", "prefix": "answer", "reuse": False}, evaluation={"rows": 0})
    train(config), train(naive)
    assert [e["objective"] for e in entries(config)] == pytest.approx([e["objective"] for e in entries(naive)], rel=1e-4)
    assert entries(config)[0]["executed_positions"] < entries(naive)[0]["executed_positions"]
    saved = last_of(config.output or "")
    assert "<|im_start|>" in (saved / "chat_template.jinja").read_text(encoding="utf-8")
    batch = prepare(with_changes(config, output=f"{config.output}-look"), resume=False).loader.next_batch()
    ends = batch.targets[(batch.targets != -100) & (batch.targets < 3)]
    assert len(ends) and set(ends.tolist()) == {2}  # <|im_end|>, and nothing behind it


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_grouped_once(recipe: MakeRecipe, jsonl: str, family: str, tmp_path: Path) -> None:
    """Law 10: linear maps of the stack and the fusion to NorMuon; embeddings, heads, routers, convolutions and the rest to Adam."""
    source = source_of(family, tmp_path / family)
    data = {"source": {"kind": "files", "paths": [jsonl]}, "length": 16, "packing": family != "lfm2"}
    run = prepare(recipe(model={"source": str(source)}, data=data), resume=False)
    groups = parameter_groups(run.model)
    owner = {name: group for group in groups for name, _ in group.parameters}
    assert set(owner) == {name for name, _ in run.model.named_parameters()}
    maps = {name for name, group in owner.items() if group.optimizer == "normuon"}
    assert maps == {name for name in owner if re.search(rf"^connection\.|\.({MAPS[family]})\.weight$", name)}
    assert {group.optimizer for group in parameter_groups(run.model, "adam")} == {"adam"}


def test_a_recurrent_trunk_trains_one_document_a_row(recipe: MakeRecipe, jsonl: str, tmp_path: Path) -> None:
    """Law 3 through the trainer: the step's loss with reuse is that of the naive passes."""
    source = source_of("lfm2", tmp_path / "lfm2")
    data: dict[str, Any] = {"source": {"kind": "files", "paths": [jsonl]}, "length": 24, "shuffle_documents": 8, "packing": False}
    model = {"source": str(source), "fusion": "gated"}
    config = recipe(model=model, data=data, feedback={"schedule": "three-pass"}, train__steps=2)
    naive = recipe("naive", model=model, data=data, feedback={"schedule": "three-pass", "reuse": False}, train__steps=2)
    train(config), train(naive)
    assert entries(config)[0]["objective"] == pytest.approx(entries(naive)[0]["objective"], rel=1e-5)
    assert entries(config)[0]["executed_positions"] < entries(naive)[0]["executed_positions"]
    batch = prepare(with_changes(config, output=f"{config.output}-look"), resume=False).loader.next_batch()
    assert (batch.documents.amax(dim=1) == 0).all() and (batch.documents < 0).any()
    with pytest.raises(ValueError, match=r"data.packing: must be false for a model with recurrent layers"):
        prepare(recipe("packed", model=model, data={**data, "packing": True}), resume=False)


def test_dropout_of_the_source_is_switched_off(recipe: MakeRecipe, jsonl: str, tmp_path: Path) -> None:
    source = source_of("gpt2", tmp_path / "gpt2")
    assert AutoConfig.from_pretrained(source).resid_pdrop == 0.1
    run = prepare(recipe(model={"source": str(source)}, data={"source": {"kind": "files", "paths": [jsonl]}, "length": 16}), resume=False)
    tokens = run.loader.next_batch().tokens
    one, two = (multipass_reference(run.model, tokens, [3])[1].states for _ in range(2))
    assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model": {"source": "/nowhere/model"}}, "/nowhere/model: no such model folder"),
        ({"data__tokenizer": "bytes", "data__length": 999}, "must be at most the model's context of 64, got 999"),
        ({"train__compile": True}, "train.compile: must be false for a Hugging Face trunk"),
        ({"data__source": {"kind": "task"}, "feedback__prefix": "answer"}, "'answer' needs data that say where answers begin"),
    ],
)
def test_what_does_not_fit_is_one_line(converted: MakeRecipe, overrides: dict[str, Any], message: str) -> None:
    config = with_changes(converted(), **overrides)
    with pytest.raises(ValueError, match=message) as caught:
        train(config)
    assert "\n" not in str(caught.value)
