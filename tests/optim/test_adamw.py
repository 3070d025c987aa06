"""`optim.kind: adam` is AdamW on all parameters, decay on the matrices alone, falling with the learning rate (AdamC)."""

import copy

import torch

from fullband.config import OptimConfig
from fullband.optim import Optimizer


def test_adam_for_all_is_adamw_with_a_falling_decay(make_model) -> None:
    model = make_model(layers=1)
    twin = copy.deepcopy(model)
    config = OptimConfig(kind="adam", adam_lr=1e-2, matrix_weight_decay=0.3, warmup_steps=0, cooldown=0.5)
    optimizer = Optimizer(model, config, steps=4)
    assert list(optimizer.optimizers) == ["adam"]
    decayed = [p for n, p in twin.named_parameters() if p.ndim == 2 and "embedding" not in n and not n.endswith("attention.gate.weight")]
    rest = [p for p in twin.parameters() if all(p is not q for q in decayed)]
    assert len(decayed) == 9 and len(rest) == 7
    theirs = torch.optim.AdamW([{"params": decayed}, {"params": rest}], betas=config.adam_betas, eps=config.adam_eps)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for ours, other in zip(model.parameters(), twin.parameters(), strict=True):
            ours.grad = torch.randn(ours.shape, generator=generator)
            other.grad = ours.grad.clone()
        factor = optimizer.factor(step)
        for group, decay in zip(theirs.param_groups, (0.3 * factor, 0.0), strict=True):
            group["lr"], group["weight_decay"] = 1e-2 * factor, decay
        theirs.step()
        optimizer.step(step)
    assert optimizer.factor(3) < 1
    for (name, ours), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-6, msg=name)


def test_its_state_survives_a_checkpoint(make_model) -> None:
    model = make_model(layers=1)
    optimizer = Optimizer(model, OptimConfig(kind="adam"), steps=4)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(0)
    other = Optimizer(copy.deepcopy(model), OptimConfig(kind="adam"), steps=4)
    other.load_state_dict({name: tensor.clone() for name, tensor in optimizer.state_dict().items()})
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, optimizer.state_dict()[name]), name
