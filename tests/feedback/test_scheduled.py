"""The passes of a microbatch as the schedule draws them; Eq. 12's weights in their one place."""

import pytest
import torch

from fullband.feedback.loss import multipass_loss, objective_by_token, token_losses_reference
from fullband.feedback.multipass import multipass
from fullband.feedback.schedule import PassSchedule
from fullband.feedback.scheduled import run_scheduled_passes
from fullband.feedback_config import FeedbackConfig, Phase
from fullband.layout import Layout


def schedule_of(passes, **settings):
    phases = [Phase(fraction=1.0, passes={passes: 1.0})]
    return PassSchedule(FeedbackConfig(schedule=phases, **settings), 10, seed=3)


def objective(model, rows, schedule, **options):
    outputs = run_scheduled_passes(model, rows.tokens, schedule, 4, layout=Layout(rows.positions, rows.documents), **options)
    return outputs, multipass_loss(outputs, model.trunk.head_weight, rows.targets, 20.0, 0.7).objective.detach()


@pytest.mark.parametrize("prefix", ["uniform", "per-row", "shared", "off"])
def test_reuse_of_prefixes_changes_nothing_that_is_drawn(isometric_model, packed_rows, prefix):
    model, rows = isometric_model(), packed_rows([[9, 15], [24], [4, 20]])
    found = [
        objective(model, rows, schedule_of(3, prefix=prefix, jitter=0.1, reuse=reuse), first_row=6, microbatch=2) for reuse in (True, False)
    ]
    assert [len(outputs) for outputs, _ in found] == [3, 3]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=1e-10)


def test_rows_are_numbered_in_the_whole_batch(isometric_model, packed_rows):
    model, rows = isometric_model(), packed_rows([[24], [24]])
    schedule = schedule_of(2, prefix="off", jitter=0.1)
    whole, _ = objective(model, rows, schedule)
    part = run_scheduled_passes(model, rows.tokens[1:], schedule, 4, 1, layout=Layout(rows.positions[1:], rows.documents[1:]))
    torch.testing.assert_close(part[1].states, whole[1].states[1:], rtol=0, atol=1e-12)
    other = run_scheduled_passes(model, rows.tokens[1:], schedule, 4, 0, layout=Layout(rows.positions[1:], rows.documents[1:]))
    assert (other[1].states - part[1].states).abs().max() > 1e-3


def test_one_token_is_run_once(isometric_model):
    assert [output.k for output in run_scheduled_passes(isometric_model(), torch.tensor([[3]]), schedule_of(3), 0)] == [1]


@pytest.mark.parametrize("prefixes", [[], [7], [13, 4], [torch.tensor([3, 17]), 6]])
def test_each_positions_part_of_the_objective(isometric_model, packed_rows, prefixes):
    model, rows = isometric_model(), packed_rows([[9, 15], [24]])
    outputs = multipass(model, rows.tokens, prefixes, Layout(rows.positions, rows.documents))
    parts = objective_by_token(outputs, model.trunk.head_weight, rows.targets, 0.7)
    assert parts.shape == rows.targets.shape
    whole = multipass_loss(outputs, model.trunk.head_weight, rows.targets, 1.0, 0.7).objective
    torch.testing.assert_close(parts.sum(), whole, rtol=0, atol=1e-10)
    losses = [token_losses_reference(out.states[:, 20 - out.start], model.trunk.head_weight, rows.targets[:, 20])[0] for out in outputs]
    expected = losses[0] + 0.7 / max(1, len(prefixes)) * sum(losses[1:], torch.zeros(2, dtype=parts.dtype))
    assert (expected > 0).any()  # the other is not scored
    torch.testing.assert_close(parts[:, 20], expected, rtol=0, atol=1e-10)
