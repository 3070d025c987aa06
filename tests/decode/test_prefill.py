"""Laws 4 and 6 for reading: chunks, padding, passes; equal to the slow reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decode.cases import WINDOW, padded, random_prompts
from fullband.decode import prefill, prefill_with_states
from fullband.model import FullBandModel
from reference.decoding import reference_rows
from reference.seam import read

TOLERANCE = 1e-10
READINGS = [0, 1, 2, "exact"]
LENGTHS = [1, WINDOW, 2 * WINDOW + 1, 3 * WINDOW]


def assert_equal(ours: Tensor, theirs: Tensor) -> None:
    assert not ours.isnan().any()
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("feedback_passes", READINGS)
def test_ragged_prompts_equal_each_alone(model: FullBandModel, feedback_passes: int | str) -> None:
    prompts = random_prompts(LENGTHS)
    expected = reference_rows(model, prompts, [[]] * len(prompts), feedback_passes, True)[:, 0]
    for chunk in (None, 1, 2, 7):
        assert_equal(prefill(model, prompts, feedback_passes, chunk).top_BD, expected)
    for side in ("left", "right"):
        tokens, mask = padded(prompts, side)
        assert_equal(prefill(model, tokens, feedback_passes, chunk=4, mask=mask).top_BD, expected)


@pytest.mark.parametrize("feedback_passes", READINGS)
@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_change_no_state(model: FullBandModel, feedback_passes: int | str, length: int) -> None:
    tokens = torch.tensor(random_prompts([length] * 3))
    expected = read(model, tokens, feedback_passes)
    for chunk in (1, 2, 7, length, None):
        state, states = prefill_with_states(model, tokens, feedback_passes, chunk)
        assert state.documents_B is None  # no padding: no step needs a mask
        assert_equal(torch.stack(states), expected)
        assert_equal(state.top_BD, expected[:, -1])


def test_states_come_without_padding(model: FullBandModel) -> None:
    prompts = random_prompts([3, 11, 7])
    _, states = prefill_with_states(model, prompts, feedback_passes=2, chunk=4)
    for row, prompt in zip(states, prompts, strict=True):
        assert_equal(row, read(model, torch.tensor([prompt]), 2)[0])


def test_enough_passes_are_exact(model: FullBandModel) -> None:
    prompts = random_prompts([9])
    assert_equal(prefill(model, prompts, feedback_passes=8).top_BD, prefill(model, prompts, feedback_passes="exact").top_BD)


def test_fused_rebuilds_the_cache_from_position_0(model: FullBandModel) -> None:
    """Law 6: a key of every position but the first differs from plain reading's, the last one included; all equal pass 2's own."""
    prompts = random_prompts([10, 10])
    plain, fused = prefill(model, prompts, 0, keep="all").cache, prefill(model, prompts, 1, chunk=3, keep="all").cache
    whole = prefill(model, prompts, 1, keep="all").cache
    for layer, plain_layer, whole_layer in zip(fused.layers, plain.layers, whole.layers, strict=True):
        assert_equal(layer.tensor, whole_layer.tensor)
        changed = (layer.tensor - plain_layer.tensor).abs().amax(dim=(0, 1, 2, 4))
        assert changed[0] < TOLERANCE and (changed[1:] > 1e-3).all()


@pytest.mark.parametrize("feedback_passes", READINGS)
def test_a_row_does_not_depend_on_its_neighbours(model: FullBandModel, feedback_passes: int | str) -> None:
    first, *others = random_prompts([8, 15, 1, 20])
    alone = prefill(model, [first], feedback_passes).top_BD[0]
    for neighbours in ([], others, others[::-1], [first[::-1]], [[5] * 20]):
        assert_equal(prefill(model, [first, *neighbours], feedback_passes, chunk=6).top_BD[0], alone)


def test_sliding_layers_keep_only_the_window(model: FullBandModel) -> None:
    prompts = random_prompts([20, 17])
    for feedback_passes in READINGS:
        cache = prefill(model, prompts, feedback_passes, chunk=3).cache
        assert [len(layer) for layer in cache.layers] == [WINDOW - 1, WINDOW - 1, 20]
        assert [len(layer) for layer in prefill(model, prompts, feedback_passes, chunk=3, keep="all").cache.layers] == [20, 20, 20]


def test_exact_reading_is_the_recurrence(model: FullBandModel) -> None:
    prompts = random_prompts([14])
    assert_equal(prefill(model, prompts, "exact").top_BD, read(model, torch.tensor(prompts), "exact").detach()[:, -1])


def test_no_gradients_are_kept(model: FullBandModel) -> None:
    assert not prefill(model, [[1, 2, 3]], 1).top_BD.requires_grad


@pytest.mark.parametrize(
    ("prompts", "arguments", "message"),
    [
        ([], {}, "no prompts"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1] * 49], {}, "prompt 0 has 49 tokens and does not fit the model's context of 48"),
        ([[1, 2], [3, 29]], {}, r"prompt 1: token id 29 at position 1 is outside 0\.\.28"),
        ([[-1]], {}, "token id -1"),
        ([[1, 2]], {"feedback_passes": -1}, "feedback_passes is 0, 1, 2"),
        ([[1, 2]], {"feedback_passes": "deep"}, "'deep'"),
        ([[1, 2]], {"chunk": 0}, "at least one position"),
        ([[1, 2]], {"mask": torch.ones(1, 2)}, "lists of ids need none"),
        (torch.ones(2, dtype=torch.long), {}, r"shape \[B, T\]"),
        (torch.ones(1, 3, dtype=torch.long), {"mask": torch.ones(1, 2)}, "mask has shape"),
        (torch.ones(1, 3, dtype=torch.long), {"mask": torch.tensor([[1, 0, 1]])}, "padding between"),
        (torch.ones(1, 3, dtype=torch.long), {"mask": torch.zeros(1, 3)}, "prompt 0 is empty"),
    ],
)
def test_bad_input_is_one_line(model: FullBandModel, prompts: object, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        prefill(model, prompts, **arguments)
    assert "\n" not in str(error.value)
