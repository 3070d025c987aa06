"""The hand-written gradients against their plain formulas, strided inputs and second derivatives included."""

import pytest
import torch

from fullband.trunk.pointwise import RMSNorm, rms_norm_reference, rotate, rotate_reference

EPS = 1e-6


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


def norm(scale=1.0):
    module = RMSNorm(6, EPS, scale).double()
    with torch.no_grad():
        module.weight.uniform_(0.5, 2, generator=torch.Generator().manual_seed(0))
    return module


def agree(fast, slow, inputs):
    upstream = torch.linspace(-1, 1, slow.numel(), dtype=slow.dtype).view_as(slow)
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-12)
    for a, b in zip(torch.autograd.grad(fast, inputs, upstream), torch.autograd.grad(slow, inputs, upstream), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.transpose(1, 2), lambda x: x[:, ::2]])
def test_norm_equals_its_formula(scale, view):
    x, module = double(2, 4, 5, 6), norm(scale)
    agree(module(view(x)), rms_norm_reference(view(x), module.weight * scale, EPS), (x, module.weight))


def test_norm_scales_tiny_and_zero_inputs_by_eps():
    x = torch.cat([double(1, 6) * 1e-5, torch.zeros(1, 6, dtype=torch.float64)]).detach().requires_grad_()
    module = norm()
    agree(module(x), rms_norm_reference(x, module.weight, EPS), (x, module.weight))


def tables(angles):
    return torch.cat([angles.cos(), angles.cos()], dim=-1), torch.cat([-angles.sin(), angles.sin()], dim=-1)


@pytest.mark.parametrize("batch", [1, 2])
def test_rotation_equals_its_formula(batch):
    x = double(2, 5, 3, 8)
    turn = tables(double(batch, 1, 5, 4).detach())
    agree(rotate(x.transpose(1, 2), *turn), rotate_reference(x.transpose(1, 2), *turn), (x,))


def test_rotation_turns_pairs_of_coordinates():
    x, angles = double(1, 1, 5, 8).detach(), double(1, 1, 5, 4).detach()
    pairs = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
    turned = torch.cat([pairs.real, pairs.imag], dim=-1)
    torch.testing.assert_close(rotate(x, *tables(angles)), turned, rtol=0, atol=1e-12)


def test_without_gradients_the_same_comes_out():
    x, turn, module = double(2, 5, 3, 8), tables(double(2, 1, 3, 4).detach()), norm()
    with torch.no_grad():
        fast = rotate(x, *turn), module(x[..., :6])
    torch.testing.assert_close(fast, (rotate(x, *turn), module(x[..., :6])), rtol=0, atol=1e-12)


def test_gradients_can_be_differentiated():
    turn = tables(torch.linspace(0, 3, 12, dtype=torch.float64).view(1, 1, 3, 4))
    assert torch.autograd.gradgradcheck(norm(), (double(2, 3, 6),))
    assert torch.autograd.gradgradcheck(lambda x: rotate(x, *turn), (double(2, 2, 3, 8),))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_takes_the_plain_path(dtype):
    x, module = double(3, 6).detach().to(dtype), norm().to(dtype)
    torch.testing.assert_close(module(x).double(), rms_norm_reference(x.double(), module.weight.double(), EPS), rtol=2e-2, atol=2e-2)
