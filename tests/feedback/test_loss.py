"""Law 9: the chunked loss is the plain loss; sums are divided once, so the microbatch split does not matter."""

import pytest
import torch

from fullband.feedback.loss import IGNORE, multipass_loss, token_losses, token_losses_reference, weighted_loss
from fullband.feedback.multipass import multipass
from fullband.layout import Layout


def example(rows=37, vocab=29, dtype=torch.float64):
    torch.manual_seed(2)
    states = torch.randn(rows, 8, dtype=dtype, requires_grad=True)
    head = torch.randn(vocab, 8, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocab, (rows,))
    targets[torch.rand(rows) < 0.4] = IGNORE
    return states, head, targets


@pytest.mark.parametrize("chunk_logits", [1, 29, 30 * 29, 36 * 29, 37 * 29, 2**22])
def test_chunks_equal_whole_logits(chunk_logits):
    states, head, targets = example()
    weights = torch.rand(2, 37, dtype=torch.float64)
    results = []
    for compute in (lambda *a: token_losses(*a, chunk_logits), token_losses_reference):
        nll, square = compute(states, head, targets)
        results.append((nll, square, *torch.autograd.grad((weights[0] * nll + weights[1] * square).sum(), (states, head))))
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-11)
    assert (results[0][0][targets == IGNORE] == 0).all() and (results[0][1][targets == IGNORE] == 0).all()
    with torch.no_grad():
        torch.testing.assert_close(token_losses(states, head, targets, chunk_logits)[0], results[1][0], rtol=0, atol=1e-11)


@pytest.mark.parametrize("chunk_logits", [1, 30 * 29, 2**22])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_weighted_loss_makes_its_own_gradients(chunk_logits, z_loss):
    states, head, targets = example()
    weights = torch.rand(37, dtype=torch.float64)
    objective, nll = weighted_loss(states, head, targets, weights, z_loss, chunk_logits)
    plain_nll, square = token_losses_reference(states, head, targets)
    plain = ((plain_nll + z_loss * square) * weights).sum()
    torch.testing.assert_close(objective, plain, rtol=0, atol=1e-11)
    torch.testing.assert_close(nll, plain_nll.detach(), rtol=0, atol=1e-11)
    expected = torch.autograd.grad(3 * plain, (states, head), create_graph=True)
    for _ in range(2):  # the second time its gradients are gone and made again
        for ours, theirs in zip(torch.autograd.grad(3 * objective, (states, head), retain_graph=True), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)
    objective, _ = weighted_loss(states, head, targets, weights, z_loss, chunk_logits)
    twice = torch.autograd.grad(3 * objective, (states, head), create_graph=True)
    for ours, theirs in zip(
        *(torch.autograd.grad(sum(g.square().sum() for g in gs), (states, head)) for gs in (twice, expected)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(weighted_loss(states, head, targets, weights, z_loss, chunk_logits)[0], plain, rtol=0, atol=1e-11)


@pytest.mark.parametrize("frozen", [0, 1])
def test_weighted_loss_of_frozen_states_or_head(frozen):
    inputs, targets = example()[:2], example()[2]
    inputs[frozen].requires_grad_(False)
    weights = torch.rand(37, dtype=torch.float64)
    (ours,) = torch.autograd.grad(weighted_loss(*inputs, targets, weights, 0.1, 100)[0], inputs[1 - frozen])
    nll, square = token_losses_reference(*inputs, targets)
    (theirs,) = torch.autograd.grad(((nll + 0.1 * square) * weights).sum(), inputs[1 - frozen])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_reference_by_hand():
    states, head, targets = example()
    nll, square = token_losses_reference(states, head, targets)
    for n in range(37):
        z = (head @ states[n]).exp().sum().log()
        scored = targets[n] != IGNORE
        assert abs(nll[n] - (z - head[targets[n].clamp(min=0)] @ states[n]) * scored) < 1e-10
        assert abs(square[n] - z**2 * scored) < 1e-9


def test_all_ignored_and_empty_rows_cost_nothing():
    states, head, targets = example()
    assert weighted_loss(states[:0], head, targets[:0], torch.ones(0, dtype=torch.float64))[0] == 0
    for some in (slice(0, 0), slice(0, 5)):
        nll, square = token_losses(states[some], head, torch.full_like(targets[some], IGNORE), 40)
        (nll.sum() + square.sum()).backward()
        assert nll.sum() == 0 and square.sum() == 0 and (head.grad == 0).all()


def test_low_precision_states_are_scored_in_float32():
    states, head, targets = example(dtype=torch.bfloat16)
    nll, square = token_losses(states, head, targets, 100)
    assert nll.dtype == square.dtype == torch.float32


def test_a_chunk_is_all_that_is_ever_held(monkeypatch):
    from fullband.feedback import loss

    sizes = []
    real = loss._chunk_losses
    monkeypatch.setattr(loss, "_chunk_losses", lambda s, h, t: sizes.append(len(s) * len(h)) or real(s, h, t))
    states, head, targets = example()
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.update({x.data_ptr(): x.numel()}) or x, lambda x: x):
        nll, _ = token_losses(states, head, targets, 5 * 29)
    nll.sum().backward()
    assert max(sizes) <= 5 * 29
    assert sum(saved.values()) < 37 * 29, "forward kept logits"


def test_the_microbatch_split_does_not_matter(isometric_model, packed_rows):
    model, rows = isometric_model(), packed_rows([[9, 5], [14], [4, 10], [-5, 9]])
    scored = (rows.targets != IGNORE).sum()
    assert len({int((row != IGNORE).sum()) for row in rows.targets}) > 2, "label masks must be uneven"

    def gradients(split):
        model.zero_grad()
        objective, passes = 0.0, []
        for part in split:
            outputs = multipass(model, rows.tokens[part], [0, 0], Layout(rows.positions[part], rows.documents[part]))
            loss = multipass_loss(outputs, model.trunk.head_weight, rows.targets[part], scored, 1.0, 0.01, chunk_logits=150)
            loss.objective.backward()
            objective += loss.objective.detach()
            passes.append(torch.stack([torch.stack([p.total, p.count, p.fused, p.fused_count, p.plain_there]) for p in loss.passes]))
        return objective, sum(passes), torch.cat([p.grad.flatten() for p in model.parameters()])

    whole = gradients([[0, 1, 2, 3]])
    for split in ([[0], [1], [2], [3]], [[0, 1, 2], [3]], [[3, 1], [2, 0]]):
        for part, all_of_it in zip(gradients(split), whole, strict=True):
            torch.testing.assert_close(part, all_of_it, rtol=0, atol=1e-10)


def test_per_pass_sums_do_not_hold_the_graph(isometric_model, packed_rows):
    model, rows = isometric_model(), packed_rows([[14]])
    loss = multipass_loss(multipass(model, rows.tokens, [3]), model.trunk.head_weight, rows.targets, 1.0)
    assert all(not getattr(p, f).requires_grad for p in loss.passes for f in ("total", "count", "fused", "fused_count", "plain_there"))
