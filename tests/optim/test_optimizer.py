"""The two optimizers as one: schedule, resume, the fusion alone."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from fullband.config import OptimConfig
from fullband.optim import NorMuon, Optimizer, is_fusion, wsd_factor

CONFIG = OptimConfig(warmup_steps=3, adam_lr=1e-2)


def train(model, optimizer: Optimizer, steps: range, only=None) -> None:
    for step in steps:
        model.loss(step).backward()
        if only is not None:
            optimizer.only(only)
        optimizer.step(step)
        optimizer.zero_grad()


def copies(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor.detach().clone() for key, tensor in tensors.items()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    different = [key for key in a if not torch.equal(a[key], b[key])]
    assert not different


def test_five_steps_saved_and_five_more_are_ten(make_model, tmp_path) -> None:
    whole = make_model()
    whole_optimizer = Optimizer(whole, CONFIG, 10)
    train(whole, whole_optimizer, range(10))

    first = make_model()
    optimizer = Optimizer(first, CONFIG, 10)
    train(first, optimizer, range(5))
    save_file(first.state_dict(), tmp_path / "model.safetensors")
    save_file(optimizer.state_dict(), tmp_path / "optimizer.safetensors")

    second = make_model(seed=1)
    resumed = Optimizer(second, CONFIG, 10)
    second.load_state_dict(load_file(tmp_path / "model.safetensors"))
    resumed.load_state_dict(load_file(tmp_path / "optimizer.safetensors"))
    train(second, resumed, range(5, 10))
    assert_same(whole.state_dict(), second.state_dict())
    assert_same(whole_optimizer.state_dict(), resumed.state_dict())


def test_each_group_gets_its_optimizer_and_settings(make_model) -> None:
    """One step equals NorMuon and plain Adam run by hand on copies."""
    config = OptimConfig(matrix_lr=0.03, matrix_weight_decay=0.2, momentum=0.8, beta2=0.7, matrix_scale="match_rms", adam_lr=0.02)
    model, twin = make_model(), make_model()
    optimizer = Optimizer(model, config, 1000)
    matrices = [p for n, p in twin.named_parameters() if p.ndim == 2 and "embedding" not in n and "attention.gate" not in n]
    rest = [p for p in twin.parameters() if not any(p is m for m in matrices)]
    normuon = NorMuon(matrices, lr=0.03, weight_decay=0.2, momentum=0.8, beta2=0.7, scale="match_rms")
    adam = torch.optim.Adam(rest, betas=(0.9, 0.95), eps=1e-8)
    for step in (0, 500, 990):
        model.loss(step).backward()
        twin.loss(step).backward()
        factor = wsd_factor(step, 1000, 200, 0.25)
        normuon.param_groups[0]["lr"], adam.param_groups[0]["lr"] = 0.03 * factor, 0.02 * factor
        assert optimizer.lr(step) == {"normuon": 0.03 * factor, "adam": 0.02 * factor}
        optimizer.step(step)
        for each in (normuon, adam):
            each.step()
        optimizer.zero_grad()
        twin.zero_grad()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_state_is_complete_before_the_first_step_and_keyed_by_name(make_model) -> None:
    state = Optimizer(make_model(), CONFIG, 10).state_dict()
    assert state["trunk.blocks.1.glu.down.weight.momentum"].shape == (8, 32)
    assert state["trunk.blocks.1.glu.down.weight.second_moment"].shape == (8, 1)
    assert {k for k in state if k.startswith("trunk.embedding")} == {
        f"trunk.embedding.weight.{k}" for k in ("step", "exp_avg", "exp_avg_sq")
    }
    assert all(isinstance(t, torch.Tensor) for t in state.values())
    assert len({t.data_ptr() for t in state.values()}) == len(state)


def test_a_state_that_does_not_fit_is_refused_untouched(make_model) -> None:
    model = make_model()
    optimizer = Optimizer(model, CONFIG, 10)
    train(model, optimizer, range(2))
    good, before = copies(optimizer.state_dict()), copies(optimizer.state_dict())
    key = "connection.mergers.0.gate.weight.momentum"
    with pytest.raises(ValueError, match=rf"{key} is missing"):
        optimizer.load_state_dict({k: t + 1 for k, t in good.items() if k != key})
    with pytest.raises(ValueError, match=rf"{key} has shape \[8, 9\], the model needs \[8, 8\]"):
        optimizer.load_state_dict({k: t + 1 for k, t in good.items()} | {key: torch.zeros(8, 9)})
    with pytest.raises(ValueError, match=r"trunk\.extra\.exp_avg belongs to no parameter"):
        optimizer.load_state_dict(good | {"trunk.extra.exp_avg": torch.zeros(1)})
    assert_same(optimizer.state_dict(), before)


def test_training_the_fusion_alone_leaves_the_rest_bit_identical(make_model) -> None:
    model = make_model()
    optimizer = Optimizer(model, CONFIG, 20)
    train(model, optimizer, range(5))
    weights, state = copies(model.state_dict()), copies(optimizer.state_dict())
    train(model, optimizer, range(5, 8), only=is_fusion)
    for before, after in ((weights, model.state_dict()), (state, optimizer.state_dict())):
        assert {key for key in before if not torch.equal(before[key], after[key])} == {key for key in before if is_fusion(key)}
    train(model, optimizer, range(8, 10))
    assert not torch.equal(weights["trunk.final_norm.weight"], model.state_dict()["trunk.final_norm.weight"])


def test_gradient_norm_and_clipping(make_model) -> None:
    model, clipped = make_model(), make_model()
    optimizer, clipping = Optimizer(model, CONFIG, 10), Optimizer(clipped, CONFIG.model_copy(update={"clip_norm": 0.5}), 10)
    assert optimizer.step(0) is None
    model.loss(0).backward()
    clipped.loss(0).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert optimizer.step(0) is None
    torch.testing.assert_close(optimizer.step(0, want_norm=True), expected)
    torch.testing.assert_close(clipping.step(0), expected)
    torch.testing.assert_close(torch.cat([p.grad.flatten() for p in clipped.parameters()]).norm(), torch.tensor(0.5))


def test_z_loss_only_in_the_cooldown(make_model) -> None:
    optimizer = Optimizer(make_model(), CONFIG, 100)
    assert [optimizer.z_loss(step) for step in (0, 74, 75, 99)] == [0, 0, 1e-5, 1e-5]


def test_a_run_without_steps_is_refused(make_model) -> None:
    with pytest.raises(ValueError, match="schedule"):
        Optimizer(make_model(), CONFIG, 0)


def test_zero_gradients_do_no_harm(make_model) -> None:
    model = make_model()
    optimizer = Optimizer(model, CONFIG, 10)
    for step in range(3):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step(step)
    assert all(p.isfinite().all() for p in model.parameters())


def test_it_minimises(make_model) -> None:
    model = make_model()
    optimizer = Optimizer(model, OptimConfig(matrix_lr=0.05, adam_lr=0.05, warmup_steps=5), 100)
    for step in range(100):
        model.loss(0).backward()
        optimizer.step(step)
        optimizer.zero_grad()
    # sum of p^2 + p cos(.) has its minimum at p = -cos(.) / 2
    lowest = make_model()
    with torch.no_grad():
        for i, p in enumerate(lowest.parameters()):
            p.copy_(-torch.cos(torch.arange(p.numel(), dtype=p.dtype).view(p.shape) * (i + 1)) / 2)
        start, end, best = make_model().loss(0), model.loss(0), lowest.loss(0)
    assert end - best < 0.05 * (start - best)
