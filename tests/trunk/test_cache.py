"""Slots and Cache are values: whatever is done to one leaves every other as it was."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, rule

from fullband.feedback.passes import PassState
from fullband.feedback.state import DecodeState
from fullband.trunk.cache import Slots
from reference.seam import embed, run_trunk


class SlotsAgainstLists(RuleBasedStateMachine):
    """Every Slots beside a plain list, through appends to old and new views, cuts and row choices; all are compared at every step."""

    views = Bundle("views")

    def __init__(self):
        super().__init__()
        self.pairs, self.next = [], 0.0

    def fresh(self, count):
        values = [self.next + i for i in range(count)]
        self.next += count
        return values

    def remember(self, slots, values):
        self.pairs.append((slots, values))
        for kept, expected in self.pairs:
            assert kept.tensor[0, 0, :, 0].tolist() == expected and len(kept) == len(expected)
        return len(self.pairs) - 1

    @rule(target=views, count=st.integers(0, 5))
    def start(self, count):
        values = self.fresh(count)
        return self.remember(Slots.of(torch.tensor(values).view(1, 1, count, 1), -2), values)

    @rule(target=views, view=views, count=st.integers(0, 70))
    def append(self, view, count):
        slots, values = self.pairs[view]
        new = self.fresh(count)
        with torch.no_grad():
            return self.remember(slots.append(torch.tensor(new).view(1, 1, count, 1)), values + new)

    @rule(target=views, view=views, data=st.data())
    def narrow(self, view, data):
        slots, values = self.pairs[view]
        first = data.draw(st.integers(0, len(values)))
        length = data.draw(st.integers(0, len(values) - first))
        return self.remember(slots.narrow(first, length), values[first : first + length])

    @rule(target=views, view=views)
    def rows(self, view):
        slots, values = self.pairs[view]
        return self.remember(slots.rows(torch.tensor([0, 0]), 0).rows(torch.tensor([1]), 0), values)


SlotsAgainstLists.TestCase.settings = settings(max_examples=40, stateful_step_count=15, deadline=None, derandomize=True)
TestSlotsAgainstLists = SlotsAgainstLists.TestCase


def test_append_to_an_old_view_spares_the_newer_one():
    old = Slots.of(torch.zeros(1, 2), -1).append(torch.ones(1, 1))
    newer = old.append(torch.full((1, 1), 2.0))
    other = old.append(torch.full((1, 1), 3.0))
    assert newer.tensor.tolist() == [[0, 0, 1, 2]] and other.tensor.tolist() == [[0, 0, 1, 3]] and old.tensor.tolist() == [[0, 0, 1]]


def test_gradients_pass_through_append():
    past, new = (torch.ones(1, 2, requires_grad=True) for _ in range(2))
    first = Slots.of(past, -1)
    (first.append(new).tensor * torch.arange(4)).sum().backward()
    assert past.grad.tolist() == [[0, 1]] and new.grad.tolist() == [[2, 3]]


@torch.no_grad()
def run(model, tokens, cache=None, keep="all", documents=None):
    return run_trunk(model.trunk, embed(model.trunk, tokens), None, documents, cache, keep)


def test_forks_continue_independently(isometric_model):
    model = isometric_model()
    tokens = torch.randint(23, (2, 14))
    _, cache = run(model, tokens[:, :9])
    _, cache = run(model, tokens[:, 9:10], cache)  # now it has room to grow
    fork = cache.fork()
    expected, _ = run(model, tokens[:, 10:], cache)
    run(model, torch.randint(23, (2, 4)), fork)
    again, _ = run(model, tokens[:, 10:], cache)
    torch.testing.assert_close(again, expected, rtol=0, atol=0)


def test_crop_is_the_cache_of_the_shorter_row(isometric_model):
    model = isometric_model()
    tokens = torch.randint(23, (2, 14))
    _, cache = run(model, tokens)
    whole, _ = run(model, tokens)
    for length in (0, 1, 4, 7, 13):
        states, longer = run(model, tokens[:, length:], cache.crop(length))
        torch.testing.assert_close(states, whole[:, length:], rtol=0, atol=1e-10)
        assert longer.length == 14 and cache.length == 14
    for length in (-1, 15):
        with pytest.raises(ValueError, match="cannot crop"):
            cache.crop(length)


def test_crop_refuses_what_a_sliding_layer_forgot(isometric_model):
    model = isometric_model(window=5)
    tokens = torch.randint(23, (1, 14))
    _, cache = run(model, tokens, keep="window")
    assert [len(layer) for layer in cache.layers] == [4, 4, 14]
    cache.crop(14)
    with pytest.raises(ValueError, match="sliding layer kept only slots 10 and later"):
        cache.crop(13)
    _, short = run(model, tokens[:, :4], keep="window")
    assert short.crop(2).length == 2  # nothing was forgotten yet


def test_select_and_repeat_choose_rows(isometric_model, packed_rows):
    model = isometric_model()
    rows = packed_rows([[-3, 7], [10], [-1, 9]])
    for documents in (rows.documents, None):
        _, cache = run(model, rows.tokens, documents=documents)
        following = torch.randint(23, (3, 2))
        expected, _ = run(model, following, cache)
        order = torch.tensor([2, 0])
        chosen, _ = run(model, following[order], cache.select(order))
        torch.testing.assert_close(chosen, expected[order], rtol=0, atol=1e-10)
        many, _ = run(model, following.repeat_interleave(2, 0), cache.repeat(2))
        torch.testing.assert_close(many, expected.repeat_interleave(2, 0), rtol=0, atol=1e-10)
        assert cache.repeat(2).batch == 6


def test_an_emptied_cache_still_chooses_rows(isometric_model, packed_rows):
    model = isometric_model()
    rows = packed_rows([[-3, 7], [10], [-1, 9]])
    _, cache = run(model, rows.tokens, documents=rows.documents)
    order = torch.tensor([2, 0])
    states, _ = run(model, rows.tokens[order], cache.crop(0).select(order), documents=rows.documents[order])
    expected, _ = run(model, rows.tokens[order], documents=rows.documents[order])
    torch.testing.assert_close(states, expected, rtol=0, atol=1e-10)


def test_the_window_bounds_memory(isometric_model):
    model = isometric_model(layers=2, full_every=3, window=5, context=2000)
    cache = None
    for _ in range(600):
        _, cache = run(model, torch.zeros(1, 1, dtype=torch.long), cache, "window")
    assert cache.length == 600
    assert all(layer._store.tensor.shape[-2] <= 64 for layer in cache.layers)
    assert cache.bytes == 2 * 4 * (2 * 2 * 4) * 8  # layers, slots, (keys and values) x heads x head dim, float64


def test_decode_state_moves_cache_and_state_together(isometric_model):
    model = isometric_model()
    tokens = torch.randint(23, (3, 6))
    states, cache = run(model, tokens)
    state = DecodeState(PassState(cache, states[:, -1:]), None, states[:, -1], torch.full((3,), 6), torch.arange(3))
    chosen = state.select(torch.tensor([2, 0]))
    assert torch.equal(chosen.top_BD, states[[2, 0], -1]) and chosen.cache.batch == 2 and chosen.documents_B.tolist() == [2, 0]
    assert state.repeat(2).documents_B.tolist() == [0, 0, 1, 1, 2, 2]
    assert torch.equal(state.fork().cache.layers[0].tensor, cache.layers[0].tensor)
