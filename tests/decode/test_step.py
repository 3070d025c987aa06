"""Laws 4 and 6 for decoding: prefill + steps = full recomputation, in every mode, whatever happens to the rows on the way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decode.cases import WINDOW, padded, random_prompts
from fullband.decode import Mode, prefill, resolve_mode, step
from fullband.feedback.state import DecodeState
from fullband.model import FullBandModel
from reference.decoding import reference_rows

MODES = [resolve_mode("standard"), resolve_mode("soft"), resolve_mode("fused"), resolve_mode("fused", 3), resolve_mode("fused", "exact")]
NEW = 2 * WINDOW  # decoded tokens: every key of the window is replaced twice
every_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: f"{mode.name}-{mode.feedback_passes}")


def assert_equal(ours: Tensor, theirs: Tensor) -> None:
    assert not ours.isnan().any()
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def reference(model: FullBandModel, mode: Mode, prompts: list[list[int]], new: list[list[int]]) -> Tensor:
    """[B, 1 + N, D]"""
    return reference_rows(model, prompts, new, mode.feedback_passes, mode.feeds_back)


def decode(model: FullBandModel, mode: Mode, state: DecodeState, new_BN: Tensor) -> Tensor:
    """Top states [B, 1 + N, D] before the first and after each of the new tokens."""
    tops = [state.top_BD]
    for tokens in new_BN.T:
        state = step(model, state, tokens, mode)
        tops.append(state.top_BD)
    return torch.stack(tops, dim=1)


@every_mode
@pytest.mark.parametrize("lengths", [[1], [5, 5], [1, WINDOW, 18], [13, 2 * WINDOW]], ids=str)
def test_prefill_and_steps_equal_full_recomputation(model: FullBandModel, mode: Mode, lengths: list[int]) -> None:
    prompts, new = random_prompts(lengths), random_prompts([NEW] * len(lengths), seed=1)
    expected = reference(model, mode, prompts, new)
    new_BN = torch.tensor(new)
    assert_equal(decode(model, mode, prefill(model, prompts, mode.feedback_passes), new_BN), expected)
    few = WINDOW + 1  # enough for the prompt's keys to leave the window
    for chunk in (1, 2, 7):
        made = decode(model, mode, prefill(model, prompts, mode.feedback_passes, chunk), new_BN[:, :few])
        assert_equal(made, expected[:, : 1 + few])
    for side in ("left", "right"):
        tokens, mask = padded(prompts, side)
        made = decode(model, mode, prefill(model, tokens, mode.feedback_passes, mask=mask), new_BN[:, :few])
        assert_equal(made, expected[:, : 1 + few])


@every_mode
@pytest.mark.parametrize("lengths", [[9, 9], [4, 9]], ids=["even", "ragged"])
def test_forks_repeats_and_reordered_rows(model: FullBandModel, mode: Mode, lengths: list[int]) -> None:
    prompts, (before, left, right) = random_prompts(lengths), random_prompts([3, 8, 8], seed=2)
    state = prefill(model, prompts, mode.feedback_passes, chunk=4)
    for token in before:
        state = step(model, state, torch.tensor([token, token]), mode)

    rows = [(row, side) for row in (0, 1) for side in (0, 1)]
    texts = [before + (left, right)[side] for _, side in rows]
    expected = dict(zip(rows, reference(model, mode, [prompts[row] for row, _ in rows], texts)[:, len(before) :], strict=True))

    # two continuations of one state, taken in turns: neither may write into the other's keys
    states = [state.fork(), state.fork()]
    tops: list[list[Tensor]] = [[], []]
    for tokens in zip(left, right, strict=True):
        for branch, token in enumerate(tokens):
            states[branch] = step(model, states[branch], torch.tensor([token, token]), mode)
            tops[branch].append(states[branch].top_BD)
    for branch in (0, 1):
        for row in (0, 1):
            assert_equal(torch.stack(tops[branch])[:, row], expected[row, branch][1:])

    sides = (0, 1, 1, 0)
    new = torch.tensor([(left, right)[side] for side in sides])
    chosen = decode(model, mode, state.repeat(2), new)
    for row, side in enumerate(sides):
        assert_equal(chosen[row], expected[row // 2, side])
    order = (1, 0, 1)
    swapped = decode(model, mode, state.select(torch.tensor(order)), new[:3])
    for place, row in enumerate(order):
        assert_equal(swapped[place], expected[row, sides[place]])


@every_mode
def test_the_slow_rows_are_each_as_alone(model: FullBandModel, mode: Mode) -> None:
    """The reference itself: rows of other lengths beside it change nothing, to the rounding of matrices of another size."""
    prompts, new = random_prompts([1, 4, 9]), random_prompts([3, 3, 3], seed=1)
    together = reference(model, mode, prompts, new)
    for row in range(3):
        assert_equal(together[row], reference(model, mode, prompts[row : row + 1], new[row : row + 1])[0])


@every_mode
def test_a_row_does_not_depend_on_its_neighbours(model: FullBandModel, mode: Mode) -> None:
    first, *others = random_prompts([7, 18, 2])
    new = torch.tensor(random_prompts([NEW] * 3, seed=3))
    alone = decode(model, mode, prefill(model, [first], mode.feedback_passes), new[:1])[0]
    assert_equal(decode(model, mode, prefill(model, [first, *others], mode.feedback_passes), new)[0], alone)


def test_a_given_state_stays_valid(model: FullBandModel) -> None:
    mode = resolve_mode("soft")
    state = prefill(model, random_prompts([7, 7]))
    keys = [layer.tensor.clone() for layer in state.cache.layers]
    tokens = torch.tensor([3, 4])
    once, again = step(model, state, tokens, mode), step(model, state, tokens, mode)
    assert torch.equal(once.top_BD, again.top_BD)
    assert all(torch.equal(layer.tensor, old) for layer, old in zip(state.cache.layers, keys, strict=True))


def test_positions_and_window(model: FullBandModel) -> None:
    state = prefill(model, random_prompts([7, 20]))
    for tokens in torch.tensor(random_prompts([5, 5])).T:
        state = step(model, state, tokens, resolve_mode("fused"))
    assert state.positions_B.tolist() == [12, 25]
    assert [len(layer) for layer in state.cache.layers] == [WINDOW - 1, WINDOW - 1, 25]


def test_soft_differs_from_standard_after_the_first_token(model: FullBandModel) -> None:
    """Law 6: same first state; the feedback shows from the second on."""
    prompts, new = random_prompts([9]), torch.tensor(random_prompts([2], seed=1))
    standard, soft = (decode(model, resolve_mode(name), prefill(model, prompts), new)[0] for name in ("standard", "soft"))
    assert torch.equal(standard[0], soft[0])
    assert (standard[1:] - soft[1:]).abs().amax(-1).min() > 1e-3


def test_modes() -> None:
    assert resolve_mode("fused").feedback_passes == 1
    assert not resolve_mode("standard").feeds_back and resolve_mode("soft", 0).feeds_back


@pytest.mark.parametrize(
    ("name", "passes", "message"),
    [
        ("softer", None, "unknown mode 'softer'"),
        ("soft", 1, "needs the mode fused"),
        ("standard", "exact", "needs the mode fused"),
        ("fused", 0, "at least 1"),
        ("fused", -2, "not -2"),
    ],
)
def test_modes_that_do_not_exist(name: str, passes: int | str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_mode(name, passes)
