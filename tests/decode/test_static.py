"""The step with fixed buffers: equal to the ordinary step, whatever the rows; the same work at the same addresses every time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from decode.cases import CONTEXT, WINDOW, random_prompts
from fullband.decode import prefill, resolve_mode, step
from fullband.decode.static import StaticStepper
from fullband.feedback.state import DecodeState
from fullband.model import FullBandModel
from reference.seam import embed, run_trunk

MODES = ["standard", "soft", "fused"]
NEW = 3 * WINDOW


def equal(ours: torch.Tensor, theirs: torch.Tensor, error: float = 1e-10) -> None:
    torch.testing.assert_close(ours, theirs, rtol=error, atol=error)


def compare(model: FullBandModel, stepper: StaticStepper, state: DecodeState, name: str, seed: int = 1, error: float = 1e-10) -> None:
    """NEW tokens, each read by the stepper, which stands at `state`, and by the ordinary step."""
    for tokens_B in torch.tensor(random_prompts([NEW] * len(state.top_BD), seed)).T:
        state = step(model, state, tokens_B, resolve_mode(name))
        equal(stepper(tokens_B), state.top_BD, error)
    assert stepper.state.positions_B.tolist() == state.positions_B.tolist()


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("lengths", [[1], [5, 5], [1, WINDOW, 18], [13, 2 * WINDOW]], ids=str)
@pytest.mark.parametrize("keep", ["window", "all"])
def test_it_equals_the_ordinary_step(model: FullBandModel, name: str, lengths: list[int], keep: Any) -> None:
    state = prefill(model, random_prompts(lengths), resolve_mode(name).feedback_passes, keep=keep)
    for capacity in (max(lengths) + NEW, CONTEXT):
        compare(model, StaticStepper(model, state, capacity, resolve_mode(name)), state, name)


@pytest.mark.parametrize("fusion", ["concat", "add", "residual"])
def test_every_fusion(isometric_model: Callable[..., FullBandModel], fusion: str) -> None:
    model = isometric_model(fusion, vocab_size=29, window=WINDOW)
    state = prefill(model, random_prompts([4, 9]))
    compare(model, StaticStepper(model, state, 40, resolve_mode("soft")), state, "soft")


def test_a_capacity_below_the_window(model: FullBandModel) -> None:
    state = prefill(model, random_prompts([2]))
    stepper = StaticStepper(model, state, WINDOW - 1, resolve_mode("soft"))
    for token in (3, 4, 5):
        state = step(model, state, torch.tensor([token]), resolve_mode("soft"))
        equal(stepper(torch.tensor([token])), state.top_BD)
    with pytest.raises(ValueError, match=f"the {WINDOW - 1} slots of the fixed buffers are used up"):
        stepper(torch.tensor([0]))


def test_loading_another_state_leaves_nothing_of_the_old_one(model: FullBandModel) -> None:
    first, second = prefill(model, random_prompts([20, 20])), prefill(model, random_prompts([7, 3], seed=5))
    stepper = StaticStepper(model, second, CONTEXT, resolve_mode("soft"))
    for state in (second, first, second):
        if state is not first:
            stepper.load(state)
            compare(model, stepper, state, "soft")
    with pytest.raises(ValueError, match="cannot take padded ones"):
        StaticStepper(model, first, CONTEXT, resolve_mode("soft")).load(second)


def test_the_given_state_stays_valid(model: FullBandModel) -> None:
    state = prefill(model, random_prompts([9, 9]))
    top, keys = state.top_BD.clone(), [layer.tensor.clone() for layer in state.cache.layers]
    stepper = StaticStepper(model, state, CONTEXT, resolve_mode("soft"))
    stepper(torch.tensor([1, 2]))
    assert torch.equal(state.top_BD, top) and all(torch.equal(a.tensor, b) for a, b in zip(state.cache.layers, keys, strict=True))


class Recorder(TorchDispatchMode):
    """Every operation with the shapes it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, list[Any]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append((str(function), [tuple(a.shape) for a in args if isinstance(a, torch.Tensor)]))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["standard", "soft"])
def test_every_step_is_the_same_work_at_the_same_addresses(model: FullBandModel, name: str) -> None:
    """What a CUDA graph asks for. `_local_scalar_dense` and `nonzero` are how a value gets to the host."""
    state = prefill(model, random_prompts([4, 9]))
    stepper = StaticStepper(model, state, CONTEXT, resolve_mode(name))
    seen, tokens_B = [], torch.tensor([1, 2])
    for _ in range(WINDOW + 1):
        with Recorder() as recorder:
            top_BD = stepper(tokens_B)
        own = stepper.state
        buffers = [top_BD, own.top_BD, own.positions_B, own.cache.filled, *own.cache.layers]
        seen.append((recorder.operations, [buffer.data_ptr() for buffer in buffers]))
    assert all(each == seen[0] for each in seen)
    assert not any(word in operation for operation, _ in seen[0][0] for word in ("_local_scalar_dense", "nonzero"))


@pytest.mark.slow
def test_compiled(isometric_model: Callable[..., FullBandModel]) -> None:
    """Once, for rows of any lengths: another state runs the same code."""
    model = isometric_model(vocab_size=29, window=WINDOW, layers=2, full_every=2)
    first, second = prefill(model, random_prompts([4, 9])), prefill(model, random_prompts([7, 2], seed=5))
    stepper = StaticStepper(model, first, CONTEXT, resolve_mode("soft"), compile=True)
    compare(model, stepper, first, "soft")
    with torch.compiler.set_stance("fail_on_recompile"):
        stepper.load(second)
        compare(model, stepper, second, "soft", seed=2)


@pytest.mark.parametrize("capacity", [9, CONTEXT + 1])
def test_a_capacity_that_cannot_work(model: FullBandModel, capacity: int) -> None:
    with pytest.raises(ValueError, match=f"more than the 9 slots used so far and at most the context, {CONTEXT}; not {capacity}"):
        StaticStepper(model, prefill(model, random_prompts([9])), capacity, resolve_mode("soft"))


def test_it_reads_one_token_a_row(model: FullBandModel) -> None:
    stepper = StaticStepper(model, prefill(model, random_prompts([9])), CONTEXT, resolve_mode("soft"))
    with pytest.raises(ValueError, match="one token a sequence at a time, not 2"):
        run_trunk(model.trunk, embed(model.trunk, torch.zeros(1, 2, dtype=torch.long)), cache=stepper.state.cache, keep="window")
