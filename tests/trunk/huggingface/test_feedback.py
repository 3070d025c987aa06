"""Laws 2, 4 and 6 on Hugging Face trunks: passes, prefill and decoding equal the slow recomputation that keeps no cache."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from torch import Tensor

from decode.cases import padded
from fullband.decode import Mode, Speculation, generate, prefill, resolve_mode, step
from fullband.feedback.state import DecodeState
from reference.decoding import reference_greedy, reference_rows
from reference.seam import embed, iterate, read, run_trunk
from trunk.huggingface.families import DENSE, FAMILIES, HYBRIDS, WINDOW, Converted, assert_near, converted, random_tokens, run_source

T = WINDOW + 3
every_family = pytest.mark.parametrize("family", FAMILIES)


def reference(model: Converted, mode: Mode, prompts: list[list[int]], new: list[list[int]]) -> Tensor:
    """Top states [B, 1 + N, D] after the prompts and after each new token."""
    return reference_rows(model, prompts, new, mode.feedback_passes, mode.feeds_back, run_source)


def decode(model: Converted, mode: Mode, state: DecodeState, new_BN: Tensor) -> Tensor:
    """Top states [B, 1 + N, D] before the first and after each of the new tokens."""
    tops = [state.top_BD]
    for tokens in new_BN.T:
        state = step(model, state, tokens, mode)
        tops.append(state.top_BD)
    return torch.stack(tops, dim=1)


@every_family
def test_law_2_passes_become_the_sequential_recurrence(family: str) -> None:
    model, tokens = converted(family), random_tokens(2, T)
    with torch.no_grad():
        exact = read(model, tokens, "exact")
        first, rest = tokens[:, :1].tolist(), tokens[:, 1:].tolist()
        assert_near(exact, reference(model, resolve_mode("fused", "exact"), first, rest))
        for done, states in enumerate(islice(iterate(model, tokens), T), start=1):
            assert_near(states[:, :done], exact[:, :done])
            assert done == T or (states - exact)[:, done:].abs().max() > 1e-3
        assert_near(read(model, tokens, 2)[0, -1], reference(model, resolve_mode("fused", 2), tokens[:1].tolist(), [[]])[0, 0])


@every_family
def test_decoding_equals_full_recomputation(family: str) -> None:
    """Every mode; ragged prompts, read whole and in chunks, padded on either side."""
    model = converted(family)
    prompts, new = [random_tokens(1, n, seed=n)[0].tolist() for n in (1, 4, WINDOW + 3)], random_tokens(3, WINDOW + 1, seed=2)
    for mode, chunks in (
        (resolve_mode("standard"), [2]),
        (resolve_mode("soft"), [None, 1, 7]),
        (resolve_mode("fused"), [2]),
        (resolve_mode("fused", 2), [1, 7]),
        (resolve_mode("fused", "exact"), [None]),
    ):
        expected = reference(model, mode, prompts, new.tolist())
        for chunk in chunks:
            assert_near(decode(model, mode, prefill(model, prompts, mode.feedback_passes, chunk), new), expected)
        side = "right" if mode.name == "soft" else "left"
        tokens, mask = padded(prompts, side)
        assert_near(prefill(model, tokens, mode.feedback_passes, mask=mask).top_BD, expected[:, 0])


@every_family
def test_a_row_does_not_depend_on_its_neighbours(family: str) -> None:
    """Selected, repeated and reordered rows go on as each would alone (top state, cache and positions move together)."""
    model, mode = converted(family), resolve_mode("fused")
    prompts, new = [random_tokens(1, n, seed=n)[0].tolist() for n in (3, WINDOW + 2)], random_tokens(4, WINDOW, seed=3)
    state = prefill(model, prompts, 1, chunk=2)
    for rows, changed in (([0, 0, 1, 1], state.repeat(2)), ([1, 0, 1, 1], state.select(torch.tensor([1, 0, 1, 1])))):
        together = decode(model, mode, changed, new)
        for i, row in enumerate(rows):
            assert_near(together[i], decode(model, mode, prefill(model, [prompts[row]], 1), new[i : i + 1])[0])


@pytest.mark.parametrize("family", DENSE)
def test_converged_reading(family: str) -> None:
    """Exact where the states do not settle, as with these weights; ragged rows as single ones."""
    model = converted(family)
    prompts = [random_tokens(1, n, seed=n)[0].tolist() for n in (3, WINDOW + 4)]
    together, exact = prefill(model, prompts, "converged"), prefill(model, prompts, "exact")
    torch.testing.assert_close(together.top_BD, exact.top_BD, rtol=0, atol=1e-2)
    for i, prompt in enumerate(prompts):
        assert_near(together.top_BD[i], prefill(model, [prompt], "converged").top_BD[0])
    mode, new = resolve_mode("fused", "converged"), random_tokens(2, 3)
    for i, row in enumerate(decode(model, mode, together, new)):
        assert_near(row, decode(model, mode, prefill(model, [prompts[i]], "converged"), new[i : i + 1])[0])


@pytest.mark.parametrize("family", HYBRIDS)
def test_what_recurrent_layers_refuse(family: str) -> None:
    model, tokens = converted(family), random_tokens(1, 6)
    for passes in ("converged",):
        with pytest.raises(ValueError, match="converged passes cut the cache back, which recurrent layers cannot"):
            read(model, tokens, passes)
    with pytest.raises(ValueError, match="cannot be cut back, as self-speculation"):
        generate(model, tokens, max_new_tokens=3, speculation=Speculation())
    with torch.no_grad():
        _, cache = run_trunk(model.trunk, embed(model.trunk, tokens), keep="all")
    with pytest.raises(ValueError, match="cannot be aligned; pad prompts on the left"):
        cache.align_right(torch.tensor([4]))


@every_family
def test_greedy_soft_text_is_the_slow_references(family: str) -> None:
    """Law 6 on the way: Soft's first new token is Standard's."""
    model, prompt = converted(family), random_tokens(1, 4)[0].tolist()
    soft = generate(model, [prompt], "soft", max_new_tokens=6, temperature=0.0)[0].tokens
    [new] = reference_greedy(model, [prompt], 6, 0, True, run_source)
    assert soft == new
    assert generate(model, [prompt], "standard", max_new_tokens=1, temperature=0.0)[0].tokens == new[:1]
