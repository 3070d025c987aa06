"""On-policy reinforcement learning under latent feedback: TRL's GRPO, with rollouts from `fullband serve`.

    pip install 'fullband[hf,serve]' trl
    python examples/grpo.py                            # a few minutes on a CPU; --mode standard is the control, --help shows the rest

Section 4.3 finds that Soft makes reasoning shorter, that tuning on traces of others undoes it, and leaves open whether on-policy training
keeps it. Here in small: products of permutations of three things (S3). A problem is `b d a f ?`. An answer says how many of the products it
writes (`1` = all, `2` = every second, `3` = every third, `0` = none), writes them, then `!` and the last product. A small Llama with a
fusion is first tuned on traces of all four kinds. Then GRPO: right is worth 1, each token costs `--token-cost`.

    server    `fullband serve --allow-weight-updates`, started here: samples answers, with their log-probabilities, in `--mode`
    policy    log-probabilities of the answers, with gradients: `config.score_as_generated` in `--answer-passes` parallel passes over the
              answer ("exact" = one position at a time, as it was sampled). k passes give the first k + 1 tokens exactly; after them the
              gradient is that of a policy that differs a little from the one that sampled: a bias, which the mismatch reports
    ratios    of the policy's probabilities to those of sampling, clipped by TRL: they see the bias, and weights that are older than the
              policy (`--update-every`)

Printed, and written by --json: accuracy and length of answers before and after, and the mismatch of log-probabilities by passes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fullband import FeedbackConfig, Layout, Optimizer, PassSchedule, attach, multipass_loss, run_scheduled_passes
from fullband.config import OptimConfig
from fullband.data.tasks import GroupWord
from fullband.decode import SampledAnswer
from fullband.evaluate.mismatch import mismatch_by_passes
from fullband.evaluate.statistics import mean_estimate
from fullband.experiments.summary import half_width
from fullband.serve.client import Client

GROUP = GroupWord("S3")
WORDS = ["<pad>", "<s>", "</s>", "?", "!", *"abcdef", *"0123"]
END, ASK, SAY, FIRST = 2, 3, 4, 5  # ids; element k of the group is FIRST + k
KINDS = {"0": 99, "1": 1, "2": 2, "3": 3}  # of traces: every how many-th product is written
LENGTH = 4  # elements of a problem
MOST_TOKENS = LENGTH + 5  # of an answer


def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def problem(draw: np.random.Generator) -> tuple[list[int], list[int]]:
    """(ids of a problem, ids of the products after each of its elements)."""
    elements = draw.integers(6, size=LENGTH)
    return [*(elements + FIRST).tolist(), ASK], (GROUP.answers(elements[None])[0] + FIRST).tolist()


def trace(products: list[int], kind: str) -> list[int]:
    """An answer of this kind."""
    return [WORDS.index(kind), *products[KINDS[kind] - 1 : -1 : KINDS[kind]], SAY, products[-1], END]


def is_right(answer: Sequence[int], last: int) -> bool:
    return list(answer[-3:]) == [SAY, last, END]


def tune(model: Any, steps: int, seed: int, rows: int = 64) -> None:
    """On traces, in three passes: problems without feedback, answers with (section 4.2)."""
    draw = np.random.default_rng([seed, 1])
    schedule = PassSchedule(FeedbackConfig(schedule=[{"fraction": 1.0, "passes": {3: 1.0}}], prefix="answer"), steps, seed)
    optimizer = Optimizer(model, OptimConfig(matrix_lr=1e-2, adam_lr=5e-3, warmup_steps=50, cooldown=0.4), steps)
    plain_BT = (torch.arange(LENGTH + 1 + MOST_TOKENS) <= LENGTH).expand(rows, -1)
    model.train()
    for step in range(steps):
        tokens, targets = torch.zeros(plain_BT.shape, dtype=torch.long), torch.full(plain_BT.shape, -100)
        for row in range(rows):
            asked, products = problem(draw)
            ids = torch.tensor(asked + trace(products, str(draw.choice(list(KINDS)))))
            tokens[row, : len(ids)] = ids
            targets[row, LENGTH : len(ids) - 1] = ids[LENGTH + 1 :]
        passes = run_scheduled_passes(model, tokens, schedule, step, layout=Layout(plain_BT=plain_BT))
        loss = multipass_loss(passes, model.trunk.head_weight, targets, denominator=int((targets >= 0).sum()))
        optimizer.zero_grad()
        loss.objective.backward()
        optimizer.step(step)
    model.eval()


@contextmanager
def serving(model: Path, weights: Path, key: str) -> Iterator[Client]:
    """A server of the model, whose weights may be replaced by those below `weights`."""
    command = [sys.executable, "-m", "fullband", "serve", str(model), "--engine", "own", "--port", "0", "--rows", "64", "--no-playground"]
    command += ["--allow-weight-updates", str(weights), "--device", "cpu", "--mode", "soft"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"FULLBAND_API_KEY": key})
    try:
        assert server.stderr is not None
        said = server.stderr.readline()
        if (address := re.search(r"http://[^\s,;]+", said)) is None:
            raise RuntimeError(f"the server did not start: {said}{server.stderr.read()}")
        client = Client(address[0], key)
        for _ in range(100):
            try:
                client.sample([[FIRST, ASK]], 1)
                break
            except ValueError:
                time.sleep(0.1)
        yield client
    finally:
        server.terminate()
        server.wait()


class Policy:
    """What TRL asks for answers (`rollout_func`), and how long they are and how often right."""

    def __init__(self, client: Client, weights: Path, mode: str, update_every: int, seed: int):
        self.client, self.weights, self.mode, self.update_every, self.seed = client, weights, mode, update_every, seed
        self.served = 0  # the step whose weights the server has

    def rollout(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """The server gets the newest weights, if it is time, and answers. A prompt's samples stand one after the other."""
        step = int(trainer.state.global_step)
        if step - self.served >= self.update_every:
            self.put(trainer.accelerator.unwrap_model(trainer.model), step)
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts[:: trainer.num_generations]]
        answers = self.client.sample(ids, MOST_TOKENS, self.mode, n=trainer.num_generations, seed=(self.seed * 10_000 + step) * 1000)
        return {
            "prompt_ids": [answer.prompt for answer in answers],
            "completion_ids": [answer.tokens for answer in answers],
            "logprobs": [answer.logprobs for answer in answers],
        }

    def put(self, model: Any, step: int) -> None:
        folder = self.weights / f"step-{step}"
        model.save_pretrained(folder)
        self.client.put_weights(folder.name)
        shutil.rmtree(folder)
        self.served = step

    def measure(self, model: Any, problems: list[tuple[list[int], list[int]]], mode: str, passes: Sequence[Any]) -> dict[str, Any]:
        """Of four answers to each problem, sampled by the server: accuracy, lengths, and log-probabilities against the model's."""
        answers = self.client.sample([asked for asked, _ in problems], MOST_TOKENS, mode, n=4, seed=10**12)
        right = [is_right(answer.tokens, problems[number // 4][1][-1]) for number, answer in enumerate(answers)]
        lengths = [len(answer.tokens) for answer in answers]
        some: list[SampledAnswer] = answers[:256]
        return {
            "answers": len(answers),
            "accuracy": statistics.fmean(right),
            "mean_length": statistics.fmean(lengths),
            "median_length": statistics.median(lengths),
            "kinds": {kind: statistics.fmean(answer.tokens[0] == WORDS.index(kind) for answer in answers) for kind in KINDS},
            "mismatch": [asdict(row) for row in mismatch_by_passes(model.eval(), some, mode, None, passes, batch_rows=64)],
        }


class Trainer(trl.GRPOTrainer):  # type: ignore[misc]
    """Ratios are to the probabilities under which the server sampled; TRL takes them from rollouts of its own vLLM only."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        output["old_per_token_logps"] = output["sampling_per_token_logps"]
        return output


def learn(model: Any, policy: Policy, arguments: argparse.Namespace, scratch: Path) -> list[dict[str, float]]:
    """GRPO; what TRL logged of each step."""
    draw = np.random.default_rng([arguments.seed, 2])
    chosen = [problem(draw) for _ in range(arguments.steps * arguments.prompts)]
    rows = {"prompt": [" ".join(WORDS[token] for token in asked) for asked, _ in chosen], "last": [products[-1] for _, products in chosen]}

    def reward(completion_ids: list[list[int]], last: list[int], **_: Any) -> list[float]:
        return [is_right(ids, end) - arguments.token_cost * len(ids) for ids, end in zip(completion_ids, last, strict=True)]

    config = trl.GRPOConfig(
        str(scratch / "trl"), max_steps=arguments.steps, per_device_train_batch_size=8 * arguments.prompts, num_generations=8,
        max_completion_length=MOST_TOKENS, temperature=1.0, learning_rate=arguments.learning_rate, lr_scheduler_type="constant",
        beta=0.0, seed=arguments.seed, report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=1, use_cpu=True, bf16=False,
        gradient_checkpointing=False, shuffle_dataset=False,
    )  # fmt: skip
    trainer = Trainer(
        model=model, reward_funcs=reward, args=config, train_dataset=Dataset.from_dict(rows), processing_class=tokenizer(),
        rollout_func=policy.rollout,
    )  # fmt: skip
    trainer.train()
    names = ("reward", "completions/mean_length", "clip_ratio/region_mean", "grad_norm")
    return [{name: entry[name] for name in names if name in entry} for entry in trainer.state.log_history if "reward" in entry]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["soft", "standard"], default="soft", help="in which answers are sampled and trained")
    parser.add_argument("--answer-passes", default="3", help="feedback passes over answers for the policy's log-probabilities, or exact")
    parser.add_argument("--tuning-steps", type=int, default=700, help="of 64 traces each, before")
    parser.add_argument("--steps", type=int, default=120, help="of GRPO")
    parser.add_argument("--prompts", type=int, default=16, help="problems in a step, each answered 8 times")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--token-cost", type=float, default=0.02, help="what each token of an answer costs; a right answer is worth 1")
    parser.add_argument("--update-every", type=int, default=1, help="steps after which the server gets the new weights")
    parser.add_argument("--problems", type=int, default=200, help="held-out problems, each answered four times, before and after")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write settings, results and the course of training to this file")
    parser.add_argument("--table", metavar="FILE", type=Path, nargs="+", help="train nothing: print a table of such files")
    arguments = parser.parse_args()
    if arguments.table:
        return table(arguments.table)
    passes: Any = arguments.answer_passes if arguments.answer_passes == "exact" else int(arguments.answer_passes)
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    torch.manual_seed(arguments.seed)
    begun = time.monotonic()
    shape = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=END, initializer_range=0.1,
    )  # fmt: skip
    model = attach(LlamaForCausalLM(shape), fusion="gated")
    tune(model, arguments.tuning_steps, arguments.seed)
    tuned = time.monotonic()
    model.config.latent_feedback_mode, model.config.feedback_passes, model.config.score_as_generated = arguments.mode, passes, True
    held_out = [problem(draw) for draw in [np.random.default_rng([arguments.seed, 3])] for _ in range(arguments.problems)]
    shown = [*sorted({0, 1, 2, 4} | ({passes} - {"exact"})), "exact"]
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        model.save_pretrained(scratch / "policy")
        tokenizer().save_pretrained(scratch / "policy")
        (scratch / "weights").mkdir()
        with serving(scratch / "policy", scratch / "weights", secrets.token_hex(16)) as client:
            policy = Policy(client, scratch / "weights", arguments.mode, arguments.update_every, arguments.seed)
            before = {mode: policy.measure(model, held_out, mode, shown) for mode in ("standard", "soft")}
            history = learn(model, policy, arguments, scratch)
            policy.put(model, arguments.steps)
            after = {mode: policy.measure(model, held_out, mode, shown) for mode in ("standard", "soft")}
    found = {
        "settings": {name: value for name, value in vars(arguments).items() if name not in ("json", "table")},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "machine": {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads()},
        "versions": {package: version(package) for package in ("torch", "transformers", "trl")},
        "seconds": {"tuning": tuned - begun, "the rest": time.monotonic() - tuned},
        "before": before,
        "after": after,
        "history": history,
    }
    report(found)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def report(found: dict[str, Any]) -> None:
    trained = found["settings"]["mode"]
    for when in ("before", "after"):
        for mode, row in found[when].items():
            note = " (trained)" if mode == trained else ""
            lengths = f"tokens {row['mean_length']:.2f} (median {row['median_length']:g})"
            kinds = ", ".join(f"{kind}: {share:.2f}" for kind, share in row["kinds"].items())
            print(f"{when:6} {mode:8}{note:10} accuracy {row['accuracy']:.3f}, {lengths}, kinds {kinds}")
    print(f"log-probabilities against those of sampling, {trained}, by feedback passes over the answer:")
    for when in ("before", "after"):
        for row in found[when][trained]["mismatch"]:
            numbers = f"mean {row['mean']:.2g}, largest {row['largest']:.2g}, ratios outside [0.8, 1.2] {100 * row['outside']:.2f}%"
            print(f"{when:6} {row['answer_passes']!s:>5}: {numbers}")


def table(files: Sequence[Path]) -> None:
    """Of several runs' --json: means ± half of the 95% interval over seeds (Student's t); differences are paired by seed."""
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    by_mode: dict[str, dict[int, Any]] = {}
    for run in runs:
        by_mode.setdefault(run["settings"]["mode"], {})[run["settings"]["seed"]] = run
    print("| mode | seeds | | before | after | after − before |\n|---|---|---|---|---|---|")
    for mode, seeds in by_mode.items():
        for name, key in (("accuracy", "accuracy"), ("tokens of an answer", "mean_length")):
            before, after = ([seeds[seed][when][mode][key] for seed in sorted(seeds)] for when in ("before", "after"))
            cells = [spread(before), spread(after), spread([b - a for a, b in zip(before, after, strict=True)])]
            print(f"| {mode} | {len(seeds)} ({', '.join(map(str, sorted(seeds)))}) | {name} | {' | '.join(cells)} |")
    if both := sorted(by_mode.get("soft", {}).keys() & by_mode.get("standard", {}).keys()):
        for name, key in (("accuracy", "accuracy"), ("tokens of an answer", "mean_length")):
            pairs = [[by_mode[mode][seed]["after"][mode][key] for mode in ("soft", "standard")] for seed in both]
            print(f"\nafter, trained in Soft minus trained in Standard, {name}: {spread([soft - standard for soft, standard in pairs])}")
    print("\n| Soft, feedback passes over the answer | mean \\|Δ log p\\|: before, after | ratios outside [0.8, 1.2]: before, after |")
    print("|---|---|---|")
    soft = by_mode.get("soft", {}).values()
    for place, row in enumerate(next(iter(soft), {"after": {"soft": {"mismatch": []}}})["after"]["soft"]["mismatch"]):
        found = [[run[when]["soft"]["mismatch"][place] for run in soft] for when in ("before", "after")]
        means = ", ".join(f"{statistics.fmean(each['mean'] for each in rows):.1e}" for rows in found)
        shares = ", ".join(f"{100 * statistics.fmean(each['outside'] for each in rows):.2f}%" for rows in found)
        print(f"| {row['answer_passes']} | {means} | {shares} |")


def spread(values: Sequence[float]) -> str:
    estimate = mean_estimate(values)
    half = half_width(estimate)
    return f"{estimate.value:.3f}" + ("" if half is None else f" ± {half:.3f}")


if __name__ == "__main__":
    main()
