"""Cost formulas against what models really have, compute and keep."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fullband import costs
from fullband.config import OptimConfig, TrunkConfig
from fullband.decode import prefill
from fullband.feedback.loss import CHUNK_LOGITS, multipass_loss
from fullband.feedback.mergers import MERGERS
from fullband.feedback.multipass import multipass
from fullband.feedback.schedule import PassSchedule
from fullband.feedback_config import SCHEDULES, ConnectionConfig, FeedbackConfig
from fullband.model import FullBandModel
from fullband.optim import Optimizer
from fullband.presets import PAPER_RUNS, TRUNKS
from fullband.spans import schedule_spans
from fullband.trunk.attention import dense_plan

MIDDLE = TrunkConfig(vocab_size=64, width=96, layers=4, heads=4, kv_heads=2, glu_width=256, context=256, window=64, full_every=2)


def meta_model(trunk: TrunkConfig, fusion: Any) -> FullBandModel:
    with torch.device("meta"):
        return FullBandModel(trunk, fusion)


@pytest.mark.parametrize("preset", sorted(TRUNKS))
@pytest.mark.parametrize("fusion", sorted(MERGERS))
def test_parameters_are_the_models_own(preset: str, fusion: Any) -> None:
    model = meta_model(TRUNKS[preset], fusion)
    found = dict.fromkeys(vars(costs.count_parameters(TRUNKS[preset])), 0)
    parts = {"embedding": "embedding", "norm": "norms", "connection": "fusion", "attention.gate": "head_gates", "glu": "glu"}
    for name, parameter in model.named_parameters():
        part = next((part for word, part in parts.items() if word in name and not (word == "glu" and "norm" in name)), "attention")
        found[part] += parameter.numel()
    counted = costs.count_parameters(TRUNKS[preset], ConnectionConfig(fusion=fusion))
    assert vars(counted) == found
    assert counted.total == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("fusion", sorted(MERGERS))
def test_optimizer_elements_are_the_optimizers_own(fusion: Any) -> None:
    model = FullBandModel(MIDDLE, fusion)
    state = Optimizer(model, OptimConfig(), steps=10).state_dict()
    elements = sum(tensor.numel() for name, tensor in state.items() if not name.endswith(".step"))
    assert elements == costs.optimizer_elements(MIDDLE, ConnectionConfig(fusion=fusion))


def test_forward_flops_match_a_counter_where_nothing_is_masked() -> None:
    """The counter sees every product of the dense reference, masked or not; with all keys counted, the formula is the same number."""
    model, length = FullBandModel(MIDDLE), 32
    model.trunk.plan = dense_plan
    tokens = torch.randint(64, (1, length))
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # the counter knows only these products
        model.trunk.head(multipass(model, tokens, [0])[1].states)
    plain, fused = costs.pass_flops(MIDDLE, costs.PAPER, length), costs.pass_flops(MIDDLE, costs.PAPER, length, fused=True)
    products = 4 * MIDDLE.heads * MIDDLE.head_size * MIDDLE.layers
    everything = length * (plain.matrices + products * length)  # pass 1, all keys
    suffix = (length - 1) * (fused.matrices + fused.fusion + fused.head + products * length)
    assert counter.get_total_flops() == pytest.approx(everything + suffix)


def test_visible_keys() -> None:
    assert costs.visible_keys(None, [1.0] * 8) == pytest.approx(4.5)
    assert costs.visible_keys(3, [1.0] * 8) == pytest.approx((1 + 2 + 3 * 6) / 8)
    assert costs.visible_keys(3, [0.0] * 7 + [1.0]) == 3


def test_a_decoded_token_costs_no_memory_of_its_context() -> None:
    """The longest context that a recipe takes: a dry run describes it without a list of its positions."""
    tracemalloc.start()
    flops = costs.decoding_flops(TRUNKS["paper-1b"], costs.PAPER, 2**24)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e6 and costs.decoding_flops(TRUNKS["paper-1b"], costs.PAPER, 2**31).attention > flops.attention
    assert costs.visible_keys(None, [1.0], first=9) == costs.visible_keys(None, [0.0] * 9 + [1.0]) == 10


def test_the_fusion_is_less_than_one_percent_of_a_decoded_token() -> None:
    assert 0.001 < costs.fusion_share(TRUNKS["paper-1b"], costs.PAPER, 8192) < 0.01


@pytest.mark.parametrize(("run", "billions"), [("paper-10b", 30), ("paper-100b", 150), ("paper-200b", 256), ("paper-400b", 512)])
def test_the_paper_runs(run: str, billions: float) -> None:
    mixture = costs.pass_mixture(SCHEDULES[run])
    cost = costs.run_cost(TRUNKS["paper-1b"], costs.PAPER, PAPER_RUNS[run], mixture, 8192, FeedbackConfig())
    assert cost.token_equivalent == pytest.approx(billions * 1e9)
    assert cost.executed_positions == pytest.approx((PAPER_RUNS[run] + cost.token_equivalent) / 2, rel=1e-3)
    assert cost.flops < cost.naive_flops


@pytest.mark.parametrize("start_step", [0, 30, 95])
@pytest.mark.parametrize("name", ["paper-200b", "paper-10b"])
def test_the_mixture_is_the_schedules_own(name: str, start_step: int) -> None:
    schedule = PassSchedule(FeedbackConfig(start_step=start_step, schedule=name), steps=400, seed=0)
    spans = schedule_spans(SCHEDULES[name], 400, start_step)
    assert [(first, stop) for first, stop, _ in spans] == [(a, b) for a, b in zip([0, *[s[1] for s in spans]], [s[1] for s in spans])]  # noqa: B905
    for first, stop, passes in spans:
        assert schedule.probabilities(first) == passes == schedule.probabilities(stop - 1)
    expected = sum(k * share for k, share in costs.pass_mixture(SCHEDULES[name], 400, start_step).items())
    assert schedule.token_equivalent_compute(1) == pytest.approx(400 * expected, rel=0.02)


@pytest.mark.parametrize(
    ("prefix", "rounding", "rows"),
    [("uniform", 1, 3), ("uniform", 8, 3), ("per-row", 1, 3), ("per-row", 4, 3), ("off", 1, 2), ("off", 8, 2)],
)
def test_executed_positions_are_what_the_schedule_draws(prefix: Any, rounding: int, rows: int) -> None:
    length, steps = 48, 3000
    config = FeedbackConfig(prefix=prefix, prefix_rounding=rounding)
    schedule = PassSchedule(config, steps=steps, seed=1)
    counts = torch.zeros(length)
    for step in range(steps):
        drawn = schedule.prefixes(step, 0, 2, length, torch.arange(rows))[0]
        counts[(int(torch.as_tensor(drawn).min()) + 1) // rounding * rounding :] += 1
    expected = torch.tensor(costs.executed_positions(length, config, rows))
    torch.testing.assert_close(counts / steps, expected, atol=0.03, rtol=0)


def test_without_reuse_every_position_is_computed_again() -> None:
    cost = costs.run_cost(MIDDLE, costs.PAPER, 1e6, {2: 1.0}, 64, FeedbackConfig(reuse=False))
    assert cost.executed_positions == cost.token_equivalent == 2e6
    assert cost.flops == pytest.approx(cost.naive_flops)


def test_the_cache_estimate_is_the_caches_size() -> None:
    model = FullBandModel(MIDDLE)
    state = prefill(model, [list(range(50)) * 4] * 3, feedback_passes=1)
    carried = state.top_BD.numel() * 4
    assert costs.decoding_memory(MIDDLE, costs.PAPER, 200, rows=3, dtype_bytes=4).cache == state.cache.bytes + carried


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activation_estimate_is_near_what_autograd_keeps(passes: int, checkpointing: bool) -> None:
    model, rows, length = FullBandModel(MIDDLE), 4, 128
    model.trunk.activation_checkpointing = checkpointing
    kept: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = multipass(model, torch.randint(64, (rows, length)), [length // 2 - 1] * (passes - 1))
    memory = costs.training_memory(MIDDLE, costs.PAPER, rows, length, passes, FeedbackConfig(), activation_checkpointing=checkpointing)
    head = rows * length * MIDDLE.vocab_size * 3 * 4
    block = rows * length * costs._saved_per_block(MIDDLE, 4) if checkpointing else 0  # one block at a time, made again in backward
    assert outputs and memory.activations - head - block == pytest.approx(sum(kept.values()), rel=0.25)


def test_the_chunk_of_logits_is_the_heads_own() -> None:
    assert costs.CHUNK_LOGITS == CHUNK_LOGITS


def test_training_flops_are_three_forwards() -> None:
    """Forward and backward of a plain pass with its loss, counted: no product is computed twice, the head's neither."""
    model, length = FullBandModel(MIDDLE), 32
    model.trunk.plan = dense_plan
    tokens = torch.randint(64, (1, length))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        multipass_loss(multipass(model, tokens, []), model.trunk.head_weight, tokens, length).objective.backward()
    plain = costs.pass_flops(MIDDLE, costs.PAPER, length)
    everything = plain.matrices + plain.head + 4 * MIDDLE.heads * MIDDLE.head_size * MIDDLE.layers * length  # all keys, masked or not
    assert counter.get_total_flops() == pytest.approx(3 * length * everything, rel=0.02)
