"""Law 3 on Hugging Face trunks: reuse of the plain prefix gives the loss and every gradient of the naive passes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from fullband.feedback.loss import IGNORE, multipass_loss
from fullband.feedback.multipass import Jitter, PassStates, multipass, multipass_reference
from fullband.layout import Layout
from reference.seam import embed, fused_pass, run_trunk
from trunk.huggingface.families import DENSE, FAMILIES, HYBRIDS, SLIDING, WINDOW, Converted, assert_near, build, converted, random_tokens

T = 4 * WINDOW + 1
PACKED = [[7, 9, 5], [T], [-4, 6, 11]]
UP, DOWN = [4, 12], [12, 4]
ORDERS = pytest.mark.parametrize("prefixes", [UP, DOWN], ids=["p2 < p3", "p2 > p3"])


def evaluate(model: Converted, rows: Any, packed: bool, compute: Any, prefixes: Any, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """(objective, gradients by name) with jitter and uneven label masks."""
    jitter = Jitter(0.1, seed=3, step=11, rows=torch.arange(len(rows.tokens)))
    layout = Layout(rows.positions, rows.documents) if packed else Layout()
    outputs = compute(model, rows.tokens, prefixes, layout, jitter, **options)
    loss = multipass_loss(outputs, model.trunk.head_weight, rows.targets, float((rows.targets != IGNORE).sum()), 0.7, 0.1, chunk_logits=200)
    model.zero_grad()
    loss.objective.backward()
    return loss.objective.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def distance(fast: tuple[Tensor, dict[str, Tensor]], slow: tuple[Tensor, dict[str, Tensor]]) -> float:
    """Largest difference of the losses and of any gradient, relative to the largest entry of that gradient (at least 0.01)."""
    assert fast[1].keys() == slow[1].keys()
    gaps = [float((fast[1][n] - g).abs().max() / g.abs().max().clamp(min=1e-2)) for n, g in slow[1].items()]
    return max([float((fast[0] - slow[0]).abs()), *gaps])


@ORDERS
@pytest.mark.parametrize("family", FAMILIES)
def test_law_3_reuse_equals_the_naive_passes(family: str, prefixes: list[int], packed_rows: Any) -> None:
    """K = 3; rows of several documents where a trunk takes them."""
    model, rows = converted(family), packed_rows(PACKED if family in DENSE else [[T], [T]])
    packed = family in DENSE
    slow = evaluate(model, rows, packed, multipass_reference, prefixes)
    assert min(slow[1][name].abs().max() for name in ("connection.mergers.0.state.weight", "connection.mergers.0.gate.weight")) > 1e-4
    for pieces in (False, True) if packed else (None,):
        assert distance(evaluate(model, rows, packed, multipass, prefixes, pieces=pieces), slow) < 1e-6


@pytest.mark.parametrize("family", ["llama", *SLIDING, *HYBRIDS])
def test_prefixes_of_rows_ends_and_residual_entry(family: str, packed_rows: Any) -> None:
    model, rows = converted(family, "residual"), packed_rows([[T]] * 3)
    for prefixes in ([0, T - 2], [T - 2, 1, 0, 9], [8, 9, 10, T - 3], [torch.tensor([3, 11, 7]), 6]):
        slow = evaluate(model, rows, False, multipass_reference, prefixes)
        assert distance(evaluate(model, rows, False, multipass, prefixes), slow) < 1e-6


@pytest.mark.parametrize("family", HYBRIDS)
def test_gradients_flow_through_recurrent_states(family: str) -> None:
    """The gradient of the last states reaches the first input through the cache, as it does when the row is read whole."""
    trunk, tokens = converted(family).trunk, random_tokens(2, 9)

    def gradient(cuts: list[int]) -> Tensor:
        inputs = embed(trunk, tokens).detach().requires_grad_()
        cache, parts = None, []
        for start, stop in zip([0, *cuts], [*cuts, 9], strict=True):
            part, cache = run_trunk(trunk, inputs[:, start:stop], cache=cache, keep="all")
            parts.append(part)
        return torch.autograd.grad((torch.cat(parts, 1)[:, 6:] ** 2).sum(), inputs)[0]

    whole = gradient([])
    assert whole[:, 0].abs().max() > 1e-3
    for cuts in ([4], [1, 3, 6], [2, 4, 7]):
        torch.testing.assert_close(gradient(cuts), whole, rtol=0, atol=1e-6 * float(whole.abs().max()))
    with pytest.raises(ValueError, match="run a single token without gradients"):
        gradient([4, 5])


def test_no_piece_is_a_single_position() -> None:
    """It would be refused."""
    model = converted("lfm2")
    for length in (2, 3, 7):
        tokens = random_tokens(1, length)
        for p in range(length - 1):
            for q in range(length - 1):
                outputs = multipass(model, tokens, [p, q])
                assert all(output.start <= prefix + 1 for output, prefix in zip(outputs[1:], (p, q), strict=True))
                for ours, naive in zip(outputs, multipass_reference(model, tokens, [p, q]), strict=True):
                    assert_near(ours.states, naive.states[:, ours.start :])


def wrong(model: Converted, tokens: Tensor, prefixes: Any, layout: Layout, jitter: Any, mistake: str) -> list[PassStates]:
    """Multi-pass by pieces, with one of the mistakes that reuse invites."""
    embeddings, positions, documents = embed(model.trunk, tokens), layout.positions_BT, layout.documents_BT

    def piece(x: Any, here: slice) -> Any:
        return None if x is None else x[:, here]

    def read_plain(cut: int) -> Any:
        here = slice(0, cut)
        return run_trunk(model.trunk, embeddings[:, here], piece(positions, here), piece(documents, here), keep="all")[1]

    plain, _ = run_trunk(model.trunk, embeddings, positions, documents)
    outputs, previous, inputs_before = [PassStates(1, 0, tokens.shape[1] - 1, plain)], plain, None
    for k, p in enumerate(prefixes, start=2):
        start, here = p + 1, slice(p + 1, None)
        cache = read_plain(start)
        if mistake == "keys of pass k-1" and inputs_before is not None and inputs_before[0] < start:
            first, states = inputs_before
            between = slice(first, start)
            _, cache = fused_pass(
                model,
                embeddings[:, between],
                states[:, between],
                states[:, first - 1],
                piece(positions, between),
                piece(documents, between),
                read_plain(first),
                "all",
                noise_BTD=jitter(k - 1, first, start, embeddings),
            )
        carried = plain if mistake == "carries pass 1" else previous
        states, _ = fused_pass(
            model,
            embeddings[:, here],
            carried[:, here],
            carried[:, p],
            piece(positions, here),
            piece(documents, here),
            cache,
            noise_BTD=jitter(k, start, tokens.shape[1], embeddings),
        )
        outputs.append(PassStates(k, start, p, states))
        inputs_before, previous = (start, previous), torch.cat([plain[:, :start], states], 1)
    return outputs


@pytest.mark.parametrize("family", ["llama", *SLIDING, *HYBRIDS])
def test_mistakes_that_reuse_invites_are_measurable(family: str, packed_rows: Any) -> None:
    model, rows = converted(family), packed_rows([[T], [T]])
    slow = evaluate(model, rows, False, multipass_reference, UP)
    assert distance(evaluate(model, rows, False, wrong, UP, mistake="none"), slow) < 1e-6
    for mistake in ("keys of pass k-1", "carries pass 1"):
        assert distance(evaluate(model, rows, False, wrong, UP, mistake=mistake), slow) > 1e-4, mistake


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "falcon_h1"])
def test_gradient_checkpointing_takes_the_naive_passes(family: str, packed_rows: Any) -> None:
    """transformers' checkpointing drops the cache. Then nothing is reused, which is said; the numbers are the same."""
    model, rows = Converted(build(family)), packed_rows([[T], [T]])
    model.train()
    expected = evaluate(model, rows, False, multipass, UP)
    lm = model.trunk.lm
    enable = lm.activation_checkpointing_enable if hasattr(lm, "activation_checkpointing_enable") else lm.gradient_checkpointing_enable
    enable()
    assert not model.trunk.supports_prefix_reuse
    with pytest.warns(UserWarning, match="prefixes are not reused, .*: its activation checkpointing drops the cache"):
        found = evaluate(model, rows, False, multipass, UP)
    assert distance(found, expected) < 1e-6
    with pytest.raises(ValueError, match="gradient checkpointing drops the cache"):
        run_trunk(model.trunk, embed(model.trunk, rows.tokens), keep="all")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        multipass(model, rows.tokens, [])  # one pass has nothing to reuse
        model.eval()
        assert model.trunk.supports_prefix_reuse
        multipass(model, rows.tokens, UP)


def test_dropout_takes_the_naive_passes() -> None:
    """With a prefix reused, passes would share its draw."""
    tokens = random_tokens(2, T)
    for family, rate in (("gpt2", "resid_pdrop"), ("llama", "attention_dropout")):
        model = Converted(build(family, **{rate: 0.1}))
        assert not model.trunk.draws_dropout
        model.train()
        with pytest.warns(UserWarning, match="prefixes are not reused, .*: it draws dropout anew in each pass"):
            outputs = multipass(model, tokens, [5])
        assert [output.start for output in outputs] == [0, 0]
        model.eval()
        assert [output.start for output in multipass(model, tokens, [5])] == [0, 6]
    quiet = Converted(build("gpt2"))
    quiet.train()
    assert not quiet.trunk.draws_dropout
