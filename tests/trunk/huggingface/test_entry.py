"""States that enter inside the stack of a Hugging Face model: the cut changes no law, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fullband.decode import prefill, resolve_mode, step
from fullband.feedback.by_passes import top_states
from fullband.feedback.multipass import multipass, multipass_reference
from fullband.layout import Layout
from fullband.trunk.huggingface import check_cut
from fullband.trunk.residual import residuals, watched
from trunk.huggingface.families import DENSE, HYBRIDS, WINDOW, Converted, assert_near, build, random_tokens

T = 2 * WINDOW + 2


def made(family: str, **connection: Any) -> Converted:
    return Converted(build(family), **({"entry": 1} | connection))


@torch.no_grad()
def recurrence(model: Converted, tokens: Tensor, plain: int = 1) -> Tensor:
    """Top states of one row, computed anew for every position by the whole model, the stream at the entry replaced by a hook."""
    (entry,), states = model.connection.entries, []
    for t in range(tokens.shape[1]):

        def merged(x: Tensor, t: int = t) -> Tensor:
            out = x.clone()
            for position in range(plain, t + 1):
                here = slice(position, position + 1)
                out[:, here] = model.connection.merge(x[:, here], states[position - 1][:, None], model.trunk)
            return out

        with watched(model.trunk, entry, merged):
            tops = model.trunk.lm.base_model(input_ids=tokens[:, : t + 1], use_cache=False).last_hidden_state
        states.append(tops[:, -1])
    return tops


@torch.no_grad()
@pytest.mark.parametrize("family", DENSE)
def test_the_cut_is_the_whole_stack(family: str) -> None:
    model, tokens = made(family, source=[0, 1, 2]), random_tokens(2, T)
    check_cut(model.trunk)
    with residuals(model.trunk) as seen:
        expected = model.trunk.lm.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    lower = model.trunk.below(tokens)
    output = model.trunk.above(lower.x_BTD)
    assert_near(output.top_BTD, expected)
    for found, depth in zip((*lower.carried, *output.carried), (0, 1, 2), strict=True):
        assert_near(found, seen[depth][0])


@torch.no_grad()
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("keep", ["all", "window"])
@pytest.mark.parametrize("family", DENSE)
def test_the_cut_is_the_whole_stack_in_pieces(family: str, keep: Any, padding: int) -> None:
    """Through both caches, a piece of one token among them; of two rows the first stands behind padding."""
    model, tokens = made(family), random_tokens(2, T)
    expected = model.trunk.lm.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    given = torch.cat([tokens[:, :padding], tokens], dim=1)
    positions = torch.arange(T + padding).repeat(2, 1)
    documents = torch.zeros_like(positions)
    positions[0], documents[0, :padding] = (positions[0] - padding).clamp(min=0), -1
    lower, upper, parts = None, None, []
    for start, stop in ((0, 2), (2, 3), (3, 8), (8, 9), (9, T + padding)):
        here = slice(start, stop)
        layout = Layout(positions[:, here], documents[:, here] if padding else None)
        x_BTD, _, lower = model.trunk.below(given[:, here], layout, lower, keep)
        part, _, upper = model.trunk.above(x_BTD, layout, upper, keep)
        parts.append(part)
    found = torch.cat(parts, dim=1)
    assert_near(found[0, padding:], expected[0])
    if not padding:
        assert_near(found, expected)
    if keep == "all" and not padding:  # what a rollback of a pass touches: the upper cache alone
        x_BTD, _, _ = model.trunk.below(tokens[:, 8:], Layout(), lower.crop(8), "none")
        assert_near(model.trunk.above(x_BTD, Layout(), upper.crop(8), "none").top_BTD, expected[:, 8:])


@torch.no_grad()
@pytest.mark.parametrize("family", DENSE)
def test_decoding_is_computing_anew(family: str) -> None:
    model, tokens = made(family), random_tokens(2, T)
    assert_near(top_states(model, tokens[:1, :8], "exact"), recurrence(model, tokens[:1, :8]))
    prompts = [tokens[0, :7].tolist(), tokens[1, :3].tolist()]
    mode = resolve_mode("soft")
    state = prefill(model, prompts, 0, chunk=4)
    for i in range(4):
        state = step(model, state, torch.tensor([tokens[0, 7 + i], tokens[1, 3 + i]]), mode)
    assert_near(state.top_BD[0], recurrence(model, tokens[:1, :11], plain=7)[0, -1])
    assert_near(state.top_BD[1], recurrence(model, tokens[1:, :7], plain=3)[0, -1])
    fused = prefill(model, prompts, 2, chunk=3)
    assert_near(fused.top_BD[0], top_states(model, tokens[:1, :7], 2)[0, -1])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", DENSE)
def test_gradients_are_those_of_hooks(family: str, checkpointing: bool) -> None:
    """Two passes; the reference runs the whole model with a hook at the entry, without checkpointing."""
    model, tokens = made(family), random_tokens(2, 9)
    gradients = []
    for fast in (True, False):
        model.zero_grad()
        if fast:
            if checkpointing:
                lm: Any = model.trunk.lm.train()
                newer = hasattr(lm, "activation_checkpointing_enable")
                (lm.activation_checkpointing_enable if newer else lm.gradient_checkpointing_enable)({"use_reentrant": False})
                with pytest.warns(UserWarning, match="prefixes are not reused"):
                    states = multipass(model, tokens, [2])[1].states
            else:
                states = multipass_reference(model, tokens, [2])[1].states
        else:
            twin = made(family)
            twin.load_state_dict(model.state_dict())
            model = twin
            base = model.trunk.lm.base_model
            first = base(input_ids=tokens, use_cache=False).last_hidden_state
            carried = model.connection.shift(first, None, Layout())
            plain = torch.arange(9)[None, :, None] <= 2

            def merged(x: Tensor, carried: Tensor = carried, plain: Tensor = plain, model: Converted = model) -> Tensor:
                return torch.where(plain, x, model.connection.merge(x, carried, model.trunk))

            with watched(model.trunk, 1, merged):
                states = base(input_ids=tokens, use_cache=False).last_hidden_state
        (states * torch.linspace(-1, 1, states.shape[-1])).sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    found, expected = gradients
    assert found.keys() == expected.keys() and any("connection" in name for name in found)
    for name in expected:
        assert_near(found[name], expected[name])


def test_a_stack_that_cannot_be_cut_is_refused() -> None:
    """A layer above the entry that looks at what one below it left behind."""
    model = made("llama")
    low, high, left = model.trunk.layers[0], model.trunk.layers[1], []
    low.register_forward_hook(lambda module, given, output: left.append(output.mean()))
    high.register_forward_pre_hook(lambda module, given: (given[0] * (1 + left.pop()), *given[1:]) if left else None)
    with pytest.raises(ValueError, match=r"'llama' cannot be connected so: its layers below depth 1 cannot be left out"):
        check_cut(model.trunk)


@pytest.mark.parametrize("family", HYBRIDS)
def test_recurrent_layers_are_refused(family: str) -> None:
    with pytest.raises(ValueError, match="a stack with recurrent layers can't be entered inside: use entry 0"):
        made(family)
