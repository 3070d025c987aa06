"""Instruction tuning: the objective over prompts and answers, evaluation as Soft reads, resume, the template in the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fullband.config import Recipe
from fullband.data.batch import IGNORE
from fullband.data.chat_template import TEMPLATE_FILE
from fullband.feedback.loss import token_losses
from fullband.feedback.multipass import Jitter, multipass_reference
from fullband.layout import Layout
from fullband.training import train
from fullband.training.evaluation import validation_losses
from fullband.training.metrics import read_metrics
from fullband.training.run import prepare
from reference.seam import read
from training.runs import StopAt, assert_same_run, last_of, with_changes

MakeRecipe = Callable[..., Recipe]


@pytest.fixture
def sft(recipe: MakeRecipe, tmp_path: Path) -> MakeRecipe:
    """Three passes over packed conversations of one to three turns, in a template of a few bytes."""
    rows = []
    for i in range(30):
        contents = [f"{i}{'xy'[j % 2] * (i * (j + 2) % 5)}" for j in range(2 + 2 * (i % 3))]
        rows.append({"messages": [{"role": ("user", "assistant")[j % 2], "content": c} for j, c in enumerate(contents)]})
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    template = "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }};{% endfor %}{% if add_generation_prompt %}a{% endif %}"
    (tmp_path / "t.jinja").write_text(template, encoding="utf-8")
    source = {"kind": "chat", "paths": [str(tmp_path / "chat.jsonl")], "validation_fraction": 0.2, "template": str(tmp_path / "t.jinja")}

    def make(output: str = "run", **overrides: Any) -> Recipe:
        options: dict[str, Any] = {
            "data": {"source": source, "length": 48, "shuffle_documents": 8},
            "feedback": {"schedule": "three-pass", "prefix": "answer"},
            "train": {"steps": 6, "batch_rows": 4, "microbatch_rows": 2, "log_every": 1, "checkpoint_every": 2, "device": "cpu"},
            "evaluation": {"every": 2, "rows": 4, "batch_rows": 2, "feedback_passes": [0, 1, "exact"]},
        }
        return recipe(output, **(options | overrides))

    return make


def test_the_first_step_is_equation_12_over_the_answers(sft: MakeRecipe) -> None:
    config = sft()
    train(config)
    first = next(entry for entry in read_metrics(Path(config.output or "") / "metrics.jsonl") if "objective" in entry)
    run = prepare(with_changes(config, output=f"{config.output}-look"), resume=False)
    batch = run.loader.next_batch()
    assert batch.plain is not None and int(batch.documents.max()) >= 1
    outputs = multipass_reference(
        run.model, batch.tokens, [batch.plain] * 2, Layout(batch.positions, batch.documents), Jitter(0.02, config.seed, 0, torch.arange(4))
    )
    losses = [token_losses(o.states.flatten(0, 1), run.model.trunk.head_weight, batch.targets.flatten())[0] for o in outputs]
    means = [float(nll.sum() / (batch.targets != IGNORE).sum()) for nll in losses]
    assert first["objective"] == pytest.approx(means[0] + (means[1] + means[2]) / 2, rel=1e-5)
    fused = ~batch.plain.flatten()
    scored = (batch.targets.flatten()[fused] != IGNORE).sum()
    assert first["fused_pass_2"] == pytest.approx(float((losses[1] * fused).sum() / scored), rel=1e-5)
    assert first["executed_positions"] < first["token_equivalent_compute"]


def test_evaluation_reads_prompts_plainly_and_answers_as_soft_makes_them(sft: MakeRecipe) -> None:
    run = prepare(sft(), resume=False)
    run.model.double().eval()
    (batch,) = run.loader.validation_batches(2, 2)
    packed = read(run.model, batch.tokens, "exact", batch.positions, batch.documents, batch.plain)
    for row in range(batch.shape[0]):
        for number in batch.documents[row].unique()[batch.documents[row].unique() >= 0]:
            at = batch.documents[row] == number
            alone = read(run.model, batch.tokens[row, at][None], "exact", plain_BT=batch.plain[row, at][None])[0]
            torch.testing.assert_close(packed[row, at], alone, rtol=0, atol=1e-10)
    nll, _ = token_losses(packed.flatten(0, 1), run.model.trunk.head_weight, batch.targets.flatten())
    assert validation_losses(run.model, [batch], ["exact"])["exact"] == pytest.approx(float(nll.sum()) / batch.counted, abs=1e-12)
    with pytest.raises(ValueError, match="'converged' takes no prompts without feedback"):
        read(run.model, batch.tokens, "converged", batch.positions, batch.documents, batch.plain)


def test_a_resumed_run_is_the_same_and_keeps_the_template(sft: MakeRecipe) -> None:
    straight, broken = sft("straight"), sft("broken")
    train(straight)
    train(broken, watcher=StopAt(3))
    train(broken, resume=True)
    assert_same_run(straight.output or "", broken.output or "")
    assert (last_of(broken.output or "") / TEMPLATE_FILE).read_text(encoding="utf-8").startswith("{% for m in messages %}")


def test_one_conversation_a_row(sft: MakeRecipe) -> None:
    config = sft()
    alone = with_changes(config, data__packing=False)
    train(alone)
    assert set(train(with_changes(alone, output=f"{config.output}-2")).validation) == {"0", "1", "exact"}
