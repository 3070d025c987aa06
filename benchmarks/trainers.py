"""Other people's trainers on a converted model, a few steps each: SFTTrainer, LoRA through PEFT, GRPOTrainer with a Soft policy.

    python -m benchmarks.trainers runs/smollm2-fullband gsm8k/train.jsonl.gz --json trainers.json

A smoke test, not a benchmark: it shows that they run on a real model, that LoRA merges exactly, and that the policy's log-probabilities of
what it sampled are those of decoding. Each part starts from the folder again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from importlib.metadata import version
from typing import Any

import torch
from datasets import Dataset, load_dataset
from transformers import AutoTokenizer, Trainer, TrainingArguments

from benchmarks.report import machine
from fullband.decode.answers import answer_logprobs
from fullband.hf import FullBandForCausalLM

SETTINGS: dict[str, Any] = dict(report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=1, use_cpu=not torch.cuda.is_available())


def supervised(folder: str, tokenizer: Any, rows: Dataset, steps: int, scratch: str) -> dict[str, Any]:
    """SFTTrainer on packed text, two passes a step."""
    import trl

    model = FullBandForCausalLM.from_pretrained(folder)
    config = trl.SFTConfig(scratch, max_steps=steps, per_device_train_batch_size=1, packing=True, max_length=256, bf16=False,
                           gradient_checkpointing=False, learning_rate=1e-4, **SETTINGS)  # fmt: skip
    texts = Dataset.from_dict({"text": [f"{row['question']}\n{row['answer']}" for row in rows]})
    trainer = trl.SFTTrainer(model=model, args=config, train_dataset=texts, processing_class=tokenizer)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses_of_both_passes": losses, "steps_counted": int(model.progress.step)}


def adapters(folder: str, tokenizer: Any, rows: Dataset, steps: int, scratch: str) -> dict[str, Any]:
    """LoRA on the trunk's attention and on the fusion; then merged."""
    import peft

    model = FullBandForCausalLM.from_pretrained(folder)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "state", "gate"], task_type="CAUSAL_LM"))
    data = [tokenizer(f"{row['question']}\n{row['answer']}", truncation=True, max_length=192) for row in rows]
    data = [{**item, "labels": list(item["input_ids"])} for item in data]
    arguments = TrainingArguments(scratch, max_steps=steps, per_device_train_batch_size=1, learning_rate=1e-4, **SETTINGS)
    trainable = sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
    trainer = Trainer(wrapped, arguments, train_dataset=data)
    trainer.train()
    prompt = tokenizer(rows[0]["question"], return_tensors="pt")
    ways = dict(max_new_tokens=24, do_sample=False, latent_feedback_mode="soft", return_dict_in_generate=True, output_logits=True)
    apart = wrapped.eval().generate(**prompt, **ways)
    merged = wrapped.merge_and_unload().generate(**prompt, **ways)
    difference = (torch.stack(apart.logits) - torch.stack(merged.logits)).abs().max()
    return {
        "losses_of_both_passes": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "trainable": trainable,
        "same_tokens_merged": torch.equal(apart.sequences, merged.sequences),
        "largest_logit_difference_merged": float(difference),
    }


def policy(folder: str, tokenizer: Any, rows: Dataset, steps: int, scratch: str) -> dict[str, Any]:
    """GRPO: sampled in Soft, scored position by position. The reward is the share of the letter e: something that samples differ in."""
    import trl

    model = FullBandForCausalLM.from_pretrained(folder)
    torch.nn.init.normal_(
        model.connection.mergers[0].state.weight, std=0.02
    )  # an untrained residual fusion is zero: Soft would be Standard
    model.config.latent_feedback_mode, model.config.feedback_passes, model.config.score_as_generated = "soft", "exact", True

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [text.count("e") / max(1, len(text)) for text in completions]

    config = trl.GRPOConfig(scratch, max_steps=steps, per_device_train_batch_size=4, num_generations=4, max_completion_length=16,
                            bf16=False, gradient_checkpointing=False, learning_rate=1e-5, temperature=1.0, **SETTINGS)  # fmt: skip
    prompts = Dataset.from_dict({"prompt": [row["question"] for row in rows]})
    trainer = trl.GRPOTrainer(model=model, reward_funcs=reward, args=config, train_dataset=prompts, processing_class=tokenizer)
    sample = trainer._generate_and_score_completions
    first: list[dict[str, Any]] = []

    def watched(inputs: Any) -> Any:
        output = sample(inputs)
        if not first:
            ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
            mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
            with torch.no_grad():
                found = trainer._get_per_token_logps_and_entropies(model, ids, mask, output["completion_ids"].shape[1])[0]
            first.append({"difference_to_soft": _apart(model, output, found, "soft"),
                          "difference_to_standard": _apart(model, output, found, "standard")})  # fmt: skip
        return output

    trainer._generate_and_score_completions = watched
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    return {"rewards": rewards, "log_probabilities": first[0]}


@torch.no_grad()
def _apart(model: FullBandForCausalLM, output: dict[str, torch.Tensor], found: torch.Tensor, mode: str) -> float:
    """Largest difference of the trainer's log-probabilities to those of decoding in `mode`."""
    apart = 0.0
    for row in range(len(found)):
        prompt = output["prompt_ids"][row][output["prompt_mask"][row].bool()].tolist()
        answer = output["completion_ids"][row][output["completion_mask"][row].bool()].tolist()
        (expected,) = answer_logprobs(model, [prompt], [answer], mode)["exact"]
        apart = max(apart, float((found[row, : len(answer)] - expected).abs().max()))
    return apart


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a converted model's folder")
    parser.add_argument("data", help="GSM8K: a jsonl file with question and answer")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    rows = load_dataset("json", data_files=arguments.data, split="train[:64]")
    results: dict[str, Any] = {"versions": {name: version(name) for name in ("torch", "transformers", "trl", "peft")}}
    results |= {"machine": machine(), "steps": arguments.steps, "seed": 0, "note": "smoke test"}
    for name, part in (("sft", supervised), ("lora", adapters), ("grpo", policy)):
        with tempfile.TemporaryDirectory() as scratch:
            results[name] = part(arguments.model, tokenizer, rows, arguments.steps, scratch)
        print(name, json.dumps(results[name], indent=2))
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            file.write(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
