"""Law 5 on Hugging Face trunks: nothing crosses from one document of a row to another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fullband.trunk.protocol import LowerOutput
from reference.seam import embed, read, run_trunk
from trunk.huggingface.families import DENSE, HYBRIDS, WINDOW, Converted, assert_near, build, converted

T = 4 * WINDOW
LENGTHS = [[6, 2 * WINDOW, 4], [-3, 8, 9], [1, 1, T - 2]]


def spans(lengths: list[int]) -> list[slice]:
    """The slots of each document."""
    found, start = [], 0
    for length in lengths:
        if length > 0:
            found.append(slice(start, start + length))
        start += abs(length)
    return found


def read_packed(model: Converted, rows: Any, size: int, keep: str = "window") -> Tensor:
    cache, parts = None, []
    for start in range(0, T, size):
        here = slice(start, start + size)
        part, cache = run_trunk(
            model.trunk, embed(model.trunk, rows.tokens[:, here]), rows.positions[:, here], rows.documents[:, here], cache, keep
        )
        parts.append(part)
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_documents_read_as_they_do_alone(family: str, attention: str, packed_rows: Any) -> None:
    """Exactly with the residual entry: over 20 tokens the gated one multiplies a rounding error by up to 540 (olmo2)."""
    model, damped, rows = converted(family), converted(family, "residual"), packed_rows(LENGTHS)
    for each in (model, damped):
        each.trunk.lm.set_attn_implementation(attention)
    try:
        with torch.no_grad():
            plain = [read_packed(model, rows, T), read_packed(model, rows, 7), read_packed(model, rows, 3, "all")]
            whole = run_trunk(model.trunk, embed(model.trunk, rows.tokens), rows.positions, rows.documents)[0]
            fused = read(model, rows.tokens, 2, rows.positions, rows.documents)
            exact = read(damped, rows.tokens, "exact", rows.positions, rows.documents)
            for i, row in enumerate(LENGTHS):
                for span in spans(row):
                    alone = rows.tokens[i : i + 1, span]
                    source = model.trunk.lm.base_model(input_ids=alone).last_hidden_state[0]
                    for states in (whole, *plain):
                        assert_near(states[i, span], source)
                    assert_near(fused[i, span], read(model, alone, 2)[0])
                    assert_near(exact[i, span], read(damped, alone, "exact")[0])
    finally:
        for each in (model, damped):
            each.trunk.lm.set_attn_implementation("sdpa")


@pytest.mark.parametrize("family", DENSE)
def test_no_gradient_crosses_a_document(family: str, packed_rows: Any) -> None:
    """Not through attention, not through feedback, not through a cache: the gradient is zero, not small."""
    model, rows = converted(family), packed_rows(LENGTHS)
    embeddings = embed(model.trunk, rows.tokens).detach().requires_grad_()
    whole = run_trunk(model.trunk, embeddings, rows.positions, rows.documents)[0]
    first, cache = run_trunk(model.trunk, embeddings[:, :9], rows.positions[:, :9], rows.documents[:, :9], keep="all")
    second, _ = run_trunk(model.trunk, embeddings[:, 9:], rows.positions[:, 9:], rows.documents[:, 9:], cache)
    model.trunk.below = lambda *_: LowerOutput(embeddings, (), None)  # what the passes start from
    try:
        fused = read(model, rows.tokens, 2, rows.positions, rows.documents)
    finally:
        del model.trunk.below
    for states in (whole, torch.cat([first, second], dim=1), fused):
        for i, row in enumerate(LENGTHS):
            for span in spans(row):
                gradient = torch.autograd.grad((states[i, span] ** 2).sum(), embeddings, retain_graph=True)[0]
                inside = torch.zeros(len(LENGTHS), T, dtype=torch.bool)
                inside[i, span] = True
                assert not gradient[~inside].any()
                assert gradient[i, span.start].abs().max() > 1e-6


@pytest.mark.parametrize("family", HYBRIDS)
def test_recurrent_layers_refuse_packed_rows_and_take_padded_ones(family: str, packed_rows: Any) -> None:
    model, rows = converted(family), packed_rows([[9, -3], [-3, 9]])
    inputs = embed(model.trunk, rows.tokens)
    packed = packed_rows([[6, 6]])
    with pytest.raises(ValueError, match="cannot run several documents in one sequence: its state would cross between them"):
        run_trunk(model.trunk, embed(model.trunk, packed.tokens), packed.positions, packed.documents)
    with torch.no_grad():
        states = run_trunk(model.trunk, inputs, rows.positions, rows.documents)[0]
        assert_near(states[0, :9], model.trunk.lm.base_model(input_ids=rows.tokens[:1, :9]).last_hidden_state[0])
        assert_near(states[1, 3:], model.trunk.lm.base_model(input_ids=rows.tokens[1:, 3:]).last_hidden_state[0])


def test_attention_without_masks_refuses_packed_rows(packed_rows: Any) -> None:
    model, rows = Converted(build("llama")), packed_rows(LENGTHS)
    model.trunk.lm.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="need attn_implementation 'sdpa' or 'eager': 'flash_attention_2' takes no masks for them"):
        run_trunk(model.trunk, embed(model.trunk, rows.tokens), rows.positions, rows.documents)
