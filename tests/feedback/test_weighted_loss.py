"""`weighted_loss` makes its gradients while the logits exist: values, gradients, and what happens when they are asked for twice."""

import pytest
import torch

from fullband.feedback.loss import IGNORE, token_losses_reference, weighted_loss

TOKENS, VOCABULARY, WIDTH, Z = 37, 53, 8, 0.1


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
    head = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    targets[::5] = IGNORE
    weights = torch.rand(TOKENS, dtype=torch.float64, generator=generator)
    weights[3] = 0
    return states, head, targets, weights


def reference(states, head, targets, weights):
    nll, square = token_losses_reference(states, head, targets)
    return ((nll + Z * square) * weights).sum()


def close(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 6, TOKENS, 1000])
def test_values_and_gradients_for_any_chunk(case, rows):
    objective, nll = weighted_loss(*case, Z, rows * VOCABULARY)
    wanted = reference(*case)
    close([objective, nll], [wanted, token_losses_reference(*case[:3])[0]])
    assert not nll.requires_grad
    close(torch.autograd.grad(3 * objective, case[:2]), torch.autograd.grad(3 * wanted, case[:2]))


def test_a_second_backward_gives_the_same_and_leaves_the_first_alone(case):
    objective, _ = weighted_loss(*case, Z, 6 * VOCABULARY)
    first = torch.autograd.grad(objective, case[:2], retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(2 * objective, case[:2], retain_graph=True)
    close(second, [2 * g for g in kept])
    close(first, kept)


def test_its_gradient_can_be_differentiated(case):
    """On a part of the case, with ignored targets and a weight of zero: numerical second derivatives take the square of its size."""
    states, head, targets, weights = (part.detach() for part in case)
    states, head = states[:7, :3].clone().requires_grad_(), head[:11, :3].clone().requires_grad_()
    targets, weights = targets[:7].where(targets[:7] == IGNORE, targets[:7] % 11), weights[:7]
    assert torch.autograd.gradgradcheck(lambda s, h: weighted_loss(s, h, targets, weights, Z, 2 * 11)[0], (states, head))


def test_a_frozen_head_gets_no_gradient(case):
    states, head, targets, weights = case
    objective, _ = weighted_loss(states, head.detach(), targets, weights, Z, 6 * VOCABULARY)
    close(torch.autograd.grad(objective, [states]), torch.autograd.grad(reference(*case), [states]))


def test_without_gradients_the_value_is_the_same(case):
    with torch.no_grad():
        close([weighted_loss(*case, Z, 6 * VOCABULARY)[0]], [reference(*case)])


def test_huge_logits_stay_finite(case):
    states, head, targets, weights = case
    objective, _ = weighted_loss(states * 1e4, head, targets, weights, 0.0, 6 * VOCABULARY)
    assert objective.isfinite() and all(g.isfinite().all() for g in torch.autograd.grad(objective, [states, head]))


@pytest.mark.parametrize("autocast", [True, False])
def test_float16_gradients_survive_a_small_weight_under_a_gradient_scaler(autocast):
    """A scaled loss, as with GradScaler: of a step of 32,768 tokens, what a large vocabulary's softmax leaves is below float16."""
    generator = torch.Generator().manual_seed(0)
    states, head = torch.randn(64, 32, generator=generator), 0.3 * torch.randn(4096, 32, generator=generator)
    targets, weights = torch.randint(4096, (64,), generator=generator), torch.full((64,), 1 / 32_768)

    def gradients(dtype, scale):
        parts = [part.to(torch.float32 if autocast else dtype).requires_grad_() for part in (states, head)]
        with torch.autocast("cpu", dtype=torch.float16, enabled=autocast and dtype == torch.float16):
            objective = weighted_loss(*parts, targets, weights, 0.0, 16 * 4096)[0]
        return [gradient.double() / scale for gradient in torch.autograd.grad(objective * scale, parts)]

    for found, wanted in zip(gradients(torch.float16, 65_536.0), gradients(torch.float32, 1.0), strict=True):
        assert (found - wanted).norm() < 2e-3 * wanted.norm()
