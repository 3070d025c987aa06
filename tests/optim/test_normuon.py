"""Law 10: NorMuon equals its slow reference; stacked equals one by one."""

import functools
import math

import pytest
import torch
from torch import Tensor, nn

from fullband.optim import NorMuon, normuon_reference
from fullband.optim import normuon as normuon_module
from fullband.optim.normuon import adamc_decay, update_scale
from fullband.optim.polar import POLYNOMIALS, polar_factor, polar_factor_reference

SHAPES = [(12, 5), (5, 12), (8, 8), (1, 9), (9, 1), (1, 1), (40, 8), (8, 40), (16, 5)]  # tall, wide, square, one row; the 40s go by Gram
SCHEDULE = [0.005, 0.01, 0.01, 0.006, 0.002, 0.0]


def random_parameters(shapes: list[tuple[int, int]], dtype: torch.dtype = torch.float64, copies: int = 1) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in shapes for _ in range(copies)]


def random_gradients(parameters: list[nn.Parameter], step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype) for p in parameters]


def train(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], schedule: list[float] = SCHEDULE) -> None:
    for step, lr in enumerate(schedule):
        for p, gradient in zip(parameters, random_gradients(parameters, step), strict=True):
            p.grad = gradient
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()


VARIANTS = [("spectral", "polar-express"), ("match_rms", "polar-express"), ("exact_rms", "quintic"), ("spectral", "quintic")]


@pytest.mark.parametrize(("scale", "polar"), VARIANTS)
def test_equals_the_reference_over_several_steps(scale: str, polar: str) -> None:
    parameters = random_parameters(SHAPES, copies=3)
    expected = [(p.detach().clone(), torch.zeros_like(p), torch.zeros(len(p), 1, dtype=p.dtype)) for p in parameters]
    optimizer = NorMuon(parameters, lr=0.01, weight_decay=0.3, scale=scale, polar=polar)
    settings = {"max_lr": 0.01, "weight_decay": 0.3, "scale": scale, "polar": polar}
    for step, lr in enumerate(SCHEDULE):
        gradients = random_gradients(parameters, step)
        for i, (p, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            p.grad = gradient.clone()
            weight, momentum, second_moment = expected[i]
            expected[i] = normuon_reference(weight, gradient, momentum, second_moment, lr=lr, **settings)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        for p, (weight, momentum, second_moment) in zip(parameters, expected, strict=True):
            torch.testing.assert_close(p.detach(), weight, rtol=0, atol=1e-10)
            torch.testing.assert_close(optimizer.state[p]["momentum"], momentum, rtol=0, atol=1e-10)
            torch.testing.assert_close(optimizer.state[p]["second_moment"], second_moment, rtol=0, atol=1e-10)


def test_stacked_equals_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    together = random_parameters(SHAPES, copies=4)
    apart = random_parameters(SHAPES, copies=4)
    split = random_parameters(SHAPES, copies=4)
    train(NorMuon(together), together)
    for i, p in enumerate(apart):
        optimizer = NorMuon([p])
        for step, lr in enumerate(SCHEDULE):
            p.grad = random_gradients(apart, step)[i]
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
    monkeypatch.setattr(normuon_module, "MAX_STACK_ELEMENTS", 130)  # two 12 x 5 matrices a stack, 40 x 8 alone
    train(NorMuon(split), split)
    for a, b, c in zip(together, apart, split, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        torch.testing.assert_close(a, c, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_quintic_equals_its_reference(shape: tuple[int, int]) -> None:
    matrices = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for matrix, result in zip(matrices, polar_factor(matrices, polar="quintic"), strict=True):
        torch.testing.assert_close(result, polar_factor_reference(matrix, polar="quintic"), rtol=0, atol=1e-11)


@pytest.mark.parametrize("shape", SHAPES)
def test_polar_factor_equals_its_reference_and_is_nearly_orthogonal(shape: tuple[int, int]) -> None:
    matrices = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    fast = polar_factor(matrices)
    for matrix, result in zip(matrices, fast, strict=True):
        torch.testing.assert_close(result, polar_factor_reference(matrix), rtol=0, atol=1e-11)
    torch.testing.assert_close(polar_factor(matrices.float()).double(), fast, rtol=0, atol=1e-3)
    # bfloat16 blurs where the polynomial is steep, so single values differ by up to its ripple of 14%; the directions stay
    low = polar_factor(matrices, dtype=torch.bfloat16).double()
    assert torch.linalg.svdvals(low).min() > 0.75 and torch.linalg.svdvals(low).max() < 1.25
    assert torch.cosine_similarity(low.flatten(1), fast.flatten(1)).min() > 0.99


def test_float32_survives_singular_values_that_vanish() -> None:
    """Early gradients have low rank; the Gram matrix then holds nothing but rounding in most directions."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, 16, generator=generator, dtype=torch.float64))[0] for n in (64, 16))
    for values in (torch.tensor([1.0, 0.5, 0.1] + [0.0] * 13), torch.logspace(0, -8, 16)):
        matrix = left @ torch.diag(values.double()) @ right.T
        for m in (matrix, matrix.T):
            result, expected = polar_factor(m.float()[None])[0].double(), polar_factor_reference(m)
            assert (result - expected).norm() < 5e-3 * expected.norm()


@pytest.mark.parametrize(("polar", "smallest", "lowest", "highest"), [("polar-express", 1e-3, 0.84, 1.15), ("quintic", 1e-2, 0.68, 1.21)])
def test_polynomial_brings_singular_values_close_to_one(polar: str, smallest: float, lowest: float, highest: float) -> None:
    values = torch.logspace(math.log10(smallest), 0, 20_001, dtype=torch.float64) / POLYNOMIALS[polar].safety
    for a, b, c in POLYNOMIALS[polar].steps:
        values = a * values + b * values**3 + c * values**5
    assert values.min() > lowest and values.max() < highest


def test_update_keeps_the_frobenius_norm_and_equalises_rows() -> None:
    (p,) = random_parameters([(6, 20)])
    before = p.detach().clone()
    p.grad = torch.diag(torch.tensor([1, 1, 1, 1, 1, 100.0], dtype=torch.float64)) @ random_gradients([p], 0)[0]
    gradient = p.grad.clone()
    NorMuon([p], lr=1.0, weight_decay=0.0).step()
    update = (before - p.detach()) / update_scale("spectral", 6, 20)
    torch.testing.assert_close(update.norm(), polar_factor(gradient[None])[0].norm())
    # at the first step v is proportional to the row's own mean square: all rows end equal
    torch.testing.assert_close(update.norm(dim=1), update.norm(dim=1).mean().expand(6))
    assert torch.equal(p.grad, gradient)  # the gradient is the caller's


def test_scale_of_the_update() -> None:
    assert update_scale("spectral", 48, 12) == 2.0
    assert update_scale("spectral", 12, 48) == 0.5
    assert update_scale("match_rms", 25, 100) == 2.0
    for shape in [(64, 16), (16, 64)]:
        (p,) = random_parameters([shape])
        before = p.detach().clone()
        p.grad = random_gradients([p], 0)[0]
        NorMuon([p], lr=1.0, weight_decay=0.0, scale="match_rms").step()
        assert (before - p.detach()).square().mean().sqrt().item() == pytest.approx(0.2, rel=0.05)


@pytest.mark.parametrize("rank", [1, 2, 16])
def test_exact_rms_moves_a_matrix_as_far_whatever_the_rank_of_its_gradient(rank: int) -> None:
    """A step that fuses few positions gives W_U and W_G a gradient of few directions: kept, the factor's norm would be that small too."""
    generator = torch.Generator().manual_seed(rank)
    left, right = (torch.randn(n, rank, generator=generator, dtype=torch.float64) for n in (40, 16))
    moved = {}
    for scale, polar in VARIANTS:
        (p,) = random_parameters([(40, 16)])
        before, p.grad = p.detach().clone(), left @ right.T
        NorMuon([p], lr=1.0, weight_decay=0.0, scale=scale, polar=polar).step()
        moved[scale] = (before - p.detach()).square().mean().sqrt().item()
    assert moved["exact_rms"] == pytest.approx(0.2, rel=1e-9)
    assert moved["match_rms"] == pytest.approx(0.2 * math.sqrt(rank / 16), rel=0.15)


def test_weight_decay_falls_with_the_square_of_the_learning_rate() -> None:
    assert adamc_decay(0.004, 0.01, 0.1) == pytest.approx(0.004 * 0.1 * 0.4)
    assert adamc_decay(0.01, 0.01, 0.1) == pytest.approx(0.01 * 0.1)
    assert adamc_decay(0.0, 0.0, 0.1) == 0.0
    (p,) = random_parameters([(4, 4)])
    before = p.detach().clone()
    optimizer = NorMuon([p], lr=0.5, weight_decay=0.1)
    optimizer.param_groups[0]["lr"] = 0.2
    p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(p.detach(), before * (1 - 0.2 * 0.1 * 0.2 / 0.5), rtol=0, atol=1e-15)


@pytest.mark.parametrize(("scale", "polar"), [VARIANTS[0], VARIANTS[2]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_zero_gradients_give_no_nan(dtype: torch.dtype, scale: str, polar: str) -> None:
    parameters = random_parameters([(6, 4), (4, 6), (4, 16)], dtype)
    before = [p.detach().clone() for p in parameters]
    optimizer = NorMuon(parameters, weight_decay=0.0, scale=scale, polar=polar)
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))
    for p in parameters:  # a dead neuron: its row stays, the others move
        p.grad = torch.ones_like(p)
        p.grad[1] = 0
    for _ in range(3):
        optimizer.step()
    for p, b in zip(parameters, before, strict=True):
        assert p.isfinite().all() and torch.equal(p[1], b[1]) and not torch.equal(p[0], b[0])
    for p in parameters:  # a gradient at the edge of the number format
        p.grad = torch.full_like(p, 1e-30)
    optimizer.step()
    assert all(p.isfinite().all() for p in parameters)


def test_parameter_without_gradient_keeps_every_bit() -> None:
    parameters = random_parameters([(6, 4)], copies=3)
    optimizer = NorMuon(parameters)
    train(optimizer, parameters)
    idle = parameters[1]
    before = [idle.detach().clone(), *(t.clone() for t in optimizer.state[idle].values())]
    for p in parameters:
        p.grad = None if p is idle else torch.ones_like(p)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, [idle, *optimizer.state[idle].values()], strict=True))


def test_bfloat16_parameters_keep_float32_state_and_follow_float32() -> None:
    low, high = random_parameters([(16, 8), (8, 32)], torch.bfloat16), random_parameters([(16, 8), (8, 32)], torch.float32)
    optimizer = NorMuon(low, lr=0.01, polar_dtype=torch.bfloat16)
    train(optimizer, low)
    train(NorMuon(high, lr=0.01), high)
    for a, b in zip(low, high, strict=True):
        assert a.dtype == torch.bfloat16 and optimizer.state[a]["momentum"].dtype == torch.float32
        torch.testing.assert_close(a.float(), b, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_state_dict_resumes_bitwise(dtype: torch.dtype) -> None:
    whole, first = random_parameters(SHAPES, dtype), random_parameters(SHAPES, dtype)
    train(NorMuon(whole), whole, [0.01] * 6)
    optimizer = NorMuon(first)
    train(optimizer, first, [0.01] * 3)
    resumed = NorMuon(first)
    resumed.load_state_dict(optimizer.state_dict())
    assert all(resumed.state[p][key].dtype == torch.float32 for p in first for key in ("momentum", "second_moment"))
    for step in range(3, 6):
        for p, gradient in zip(first, random_gradients(first, step), strict=True):
            p.grad = gradient
        resumed.step()
    assert all(torch.equal(a, b) for a, b in zip(whole, first, strict=True))


@pytest.mark.parametrize(("scale", "polar"), VARIANTS[:3])
def test_agrees_with_pytorch_optimizer(scale: str, polar: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An outside implementation, brought to the same reading of the algorithm.

    - It averages the momentum, (1 - mu) G, where we add G; the polar factor does not see the scale. Nesterov is off in dion.
    - It takes other coefficients on an input without the safety factor: ours go in, the factor moved into the first triple.
    - It orthogonalises in bfloat16 always: the function is swapped for itself in float64.
    - Its spectral scale is sqrt(max(1, fan_out / fan_in)): the same for tall and square matrices only, so no wide ones there.
    - It knows no AdamC: its weight decay is set to wd x lr / lr_max at each step.
    """
    from pytorch_optimizer import NorMuon as Oracle
    from pytorch_optimizer.optimizer.muon import normuon as oracle_module

    in_float64 = functools.partial(oracle_module.zero_power_via_newton_schulz_5, dtype=torch.float64, eps=1e-12)
    monkeypatch.setattr(oracle_module, "zero_power_via_newton_schulz_5", in_float64)
    (a, b, c), *others = POLYNOMIALS["polar-express"].steps
    safety = POLYNOMIALS["polar-express"].safety
    coefficients = [(a / safety, b / safety**3, c / safety**5), *others] if polar == "polar-express" else "original"

    shapes = [s for s in SHAPES if scale != "spectral" or s[0] >= s[1]]
    ours, theirs = random_parameters(shapes), random_parameters(shapes)
    optimizer = NorMuon(ours, lr=0.01, weight_decay=0.3, scale=scale, polar=polar)
    group = {"params": theirs, "use_muon": True}
    oracle = Oracle(
        [group],
        momentum=0.95,
        beta2=0.95,
        nesterov=False,
        ns_coeffs=coefficients,
        use_adjusted_lr=scale == "match_rms",
        update_scale="match_rms" if scale == "exact_rms" else "preserve_norm",  # its match_rms is Algorithm 1 of the paper
        eps=1e-8,
        foreach=False,
    )
    for step, lr in enumerate(SCHEDULE):
        for p, q, gradient in zip(ours, theirs, random_gradients(ours, step), strict=True):
            p.grad, q.grad = gradient.clone(), gradient.clone()
        optimizer.param_groups[0]["lr"] = lr
        oracle.param_groups[0]["lr"], oracle.param_groups[0]["weight_decay"] = lr, 0.3 * lr / 0.01
        optimizer.step()
        oracle.step()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-6)  # the epsilons sit at different scales of the momentum


def test_refuses_what_it_cannot_update() -> None:
    with pytest.raises(ValueError, match="matrices"):
        NorMuon([nn.Parameter(torch.zeros(3))])
    for wrong in ({"lr": -1.0}, {"momentum": 1.0}, {"beta2": -0.1}, {"weight_decay": math.nan}, {"scale": "rms"}, {"polar": "svd"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            NorMuon(random_parameters([(2, 2)]), **wrong)
