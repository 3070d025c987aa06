"""Other people's trainers, unmodified: Trainer, SFTTrainer, PEFT, GRPOTrainer, torchrun."""

import json
import os
import re
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments

from fullband.decode.answers import answer_logprobs
from fullband.hf import FullBandForCausalLM, attach
from hf.sources import write_source

SHAPE = dict(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8
)
PHASES = [{"fraction": 0.5, "passes": {1: 0.5, 2: 0.5}}, {"fraction": 0.5, "passes": {2: 0.5, 3: 0.5}}]


def make(**settings):
    torch.manual_seed(0)
    source = LlamaForCausalLM(LlamaConfig(**SHAPE, max_position_embeddings=128, eos_token_id=2, pad_token_id=0, bos_token_id=1))
    return attach(source, fusion="gated", **settings)


@pytest.fixture
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<s>", "</s>", "<unk>", *[f"w{i}" for i in range(60)]]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    return made


def rows(count=24, length=12):
    ids = torch.randint(4, 64, (count, length), generator=torch.Generator().manual_seed(3))
    return Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist()})


def arguments(folder, **more):
    defaults = dict(
        output_dir=str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-2, logging_steps=1,
        report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", seed=1,
    )  # fmt: skip
    return TrainingArguments(**(defaults | more))


def test_trainer_follows_the_schedule_and_resumes_where_it_was(tmp_path):
    def losses(model, folder, resume=None, **more):
        trainer = Trainer(model=model, args=arguments(folder, max_steps=6, **more), train_dataset=rows())
        trainer.train(resume_from_checkpoint=resume)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    settings = dict(feedback={"schedule": PHASES}, training_steps=6, training_seed=4)
    straight = make(**settings)
    expected = losses(straight, tmp_path / "straight", save_strategy="steps", save_steps=3)
    assert int(straight.state_dict()["progress.step"]) == 6
    resumed = make(**settings)
    found = losses(resumed, tmp_path / "resumed", resume=str(tmp_path / "straight" / "checkpoint-3"))
    assert found[-3:] == expected[-3:]
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_trainer_in_bfloat16_keeps_the_passes(tmp_path):
    """Accelerate wraps `forward` in autocast: it takes the function out of the method."""
    model = make()
    before = model.connection.mergers[0].state.weight.detach().clone()
    Trainer(model=model, args=arguments(tmp_path, max_steps=2, bf16=True), train_dataset=rows()).train()
    assert int(model.progress.step) == 2 and not torch.equal(before, model.connection.mergers[0].state.weight)


def test_a_step_in_which_nothing_is_scored_changes_no_weight_to_nan(tmp_path):
    model = make()
    data = rows(4).to_list()
    for row in data[::2]:
        row["labels"] = [-100] * len(row["labels"])
    settings = dict(per_device_train_batch_size=1, gradient_accumulation_steps=1, max_steps=4)
    Trainer(model=model, args=arguments(tmp_path, **settings), train_dataset=Dataset.from_list(data)).train()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_training_that_keeps_its_labels_to_itself_is_warned_about(tmp_path):
    model = make()
    with pytest.warns(UserWarning, match="feedback is not trained"):
        Trainer(model=model, args=arguments(tmp_path, max_steps=1, label_smoothing_factor=0.1), train_dataset=rows()).train()


@pytest.mark.slow
def test_the_page_on_trainers_runs(tmp_path):
    """docs/trainers.md, on a tiny model in place of the one on the hub."""
    page = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    write_source(tmp_path / "source")
    (tmp_path / "README.md").write_text("a line of text that is longer than forty characters, for sure\n" * 4, encoding="utf-8")
    script = block.replace("HuggingFaceTB/SmolLM2-135M-Instruct", "source").replace("report_to=[]", "report_to=[], use_cpu=True")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    tuned = FullBandForCausalLM.from_pretrained(tmp_path / "smollm2-tuned")
    assert int(tuned.progress.step) == 20 and tuned.connection.mergers[0].state.weight.abs().sum() > 0


@pytest.mark.parametrize("packing", [None, "packed", "padding_free"])
def test_sft_trainer_trains_it(tmp_path, tokenizer, packing):
    trl = pytest.importorskip("trl")
    texts = Dataset.from_dict({"text": [" ".join(f"w{(i * j) % 60}" for j in range(1, 9)) for i in range(24)]})
    options = {None: {}, "packed": {"packing": True, "max_length": 32}, "padding_free": {"padding_free": True, "max_length": None}}[packing]
    common = vars(arguments(tmp_path))
    config = trl.SFTConfig(
        **{name: common[name] for name in ("output_dir", "per_device_train_batch_size", "learning_rate", "report_to", "disable_tqdm")},
        max_steps=4, logging_steps=1, use_cpu=True, save_strategy="no", bf16=False, gradient_checkpointing=False, **options,
    )  # fmt: skip
    model = make()
    before = model.connection.mergers[0].state.weight.detach().clone()
    trainer = trl.SFTTrainer(model=model, args=config, train_dataset=texts, processing_class=tokenizer)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 4 and all(0 < entry["mean_token_accuracy"] < 1 or entry["mean_token_accuracy"] == 0 for entry in logged)
    assert int(model.progress.step) >= 3 and not torch.equal(before, model.connection.mergers[0].state.weight)


def test_lora_trains_its_adapters_only_and_merges_exactly(tmp_path):
    peft = pytest.importorskip("peft")
    model = make()
    frozen = {name: p.detach().clone() for name, p in model.named_parameters()}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "state", "gate"], task_type="CAUSAL_LM"))
    Trainer(model=wrapped, args=arguments(tmp_path, max_steps=3), train_dataset=rows()).train()
    changed = {name for name, p in wrapped.named_parameters() if p.requires_grad and p.abs().sum() > 0}
    assert any("connection.mergers.0.state.lora_B" in name for name in changed) and any("q_proj.lora_B" in name for name in changed)
    ids = torch.tensor([[5, 9, 17, 30]])
    settings = dict(max_new_tokens=6, do_sample=False, latent_feedback_mode="soft", output_logits=True, return_dict_in_generate=True)
    unmerged = wrapped.eval().generate(ids, **settings)
    merged = wrapped.merge_and_unload()
    assert isinstance(merged, FullBandForCausalLM)
    again = merged.generate(ids, **settings)
    assert torch.equal(unmerged.sequences, again.sequences)
    torch.testing.assert_close(torch.stack(unmerged.logits), torch.stack(again.logits), atol=1e-4, rtol=1e-4)
    name = "connection.mergers.0.state.weight"
    assert not torch.equal(frozen[name], dict(merged.named_parameters())[name])


def test_grpo_samples_soft_and_scores_the_same(tmp_path, tokenizer):
    trl = pytest.importorskip("trl")
    model = make(latent_feedback_mode="soft", feedback_passes="exact", score_as_generated=True)
    asked = []

    def reward(completions, **_):
        asked.append(len(completions))
        return [float(len(set(text.split()))) for text in completions]

    config = trl.GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=4, num_generations=4, max_completion_length=6, max_steps=2, logging_steps=1,
        report_to=[], use_cpu=True, save_strategy="no", bf16=False, gradient_checkpointing=False, disable_tqdm=True, learning_rate=1e-3,
        temperature=1.0,
    )  # fmt: skip
    prompts = Dataset.from_dict({"prompt": ["w1 w2 w3", "w4 w5", "w6 w7 w8 w9", "w10 w11"] * 2})
    trainer = trl.GRPOTrainer(model=model, reward_funcs=reward, args=config, train_dataset=prompts, processing_class=tokenizer)
    sampled = []
    generate = trainer._generate_and_score_completions

    def watched(inputs):
        output = generate(inputs)
        sampled.append(output)
        return output

    trainer._generate_and_score_completions = watched
    trainer.train()
    assert len(asked) == 2 and trainer.state.global_step == 2
    # The policy's own log-probabilities of what it sampled are those of decoding, not of a plain reading.
    output = sampled[0]
    fresh = make(latent_feedback_mode="soft", feedback_passes="exact", score_as_generated=True).eval()
    trl.trainer.utils.add_fused_lm_head(fresh, outputs=("log_probs", "entropy"))
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    found, _ = trainer._get_per_token_logps_and_entropies(fresh, ids, mask, output["completion_ids"].shape[1])[:2]
    for row in range(ids.shape[0]):
        prompt = output["prompt_ids"][row][output["prompt_mask"][row].bool()].tolist()
        answer = output["completion_ids"][row][output["completion_mask"][row].bool()].tolist()
        (expected,) = answer_logprobs(fresh, [prompt], [answer])["exact"]
        torch.testing.assert_close(found[row, : len(answer)], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_two_ranks_under_torchrun_make_the_gradients_of_one(tmp_path, monkeypatch):
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent(
            """
            import json, os, sys, torch
            from datasets import Dataset
            from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
            from fullband.hf import attach
            torch.manual_seed(0)
            shape = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                         num_key_value_heads=1, head_dim=8, max_position_embeddings=64)
            schedule = [{"fraction": 1.0, "passes": {1: 0.4, 2: 0.4, 3: 0.2}}]
            model = attach(LlamaForCausalLM(LlamaConfig(**shape)), fusion="gated",
                           feedback={"schedule": schedule, "jitter": 0.0}, training_steps=6)
            ids = torch.randint(4, 64, (24, 12), generator=torch.Generator().manual_seed(3)).tolist()
            ranks = int(os.environ.get("WORLD_SIZE", 1))
            arguments = TrainingArguments(output_dir=sys.argv[1], per_device_train_batch_size=4 // ranks, max_steps=6, learning_rate=1e-2,
                                          report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, optim="sgd", max_grad_norm=0.0)
            Trainer(model=model, args=arguments, train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids})).train()
            if int(os.environ.get("RANK", 0)) == 0:
                json.dump({n: p.detach().flatten().tolist() for n, p in model.named_parameters()}, open(sys.argv[2], "w"))
            """
        )
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=29631"]
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path / "o"), str(one)])
    runpy.run_path(str(script))
    subprocess.run([*launch, str(script), str(tmp_path / "t"), str(two)], check=True, env=environment, timeout=300)
    alone, together = json.loads(one.read_text()), json.loads(two.read_text())
    for name, values in alone.items():
        found = torch.tensor(together[name])
        torch.testing.assert_close(found, torch.tensor(values), atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
