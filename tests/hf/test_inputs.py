"""What `forward` is given besides tokens: rows that begin inside a document, masks with holes, arguments that would be ignored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fullband.hf import FeedbackCache, FullBandForCausalLM
from fullband.hf.packing import describe_rows
from hf.models import PADDED, assert_near, make, shared
from reference.seam import read
from trunk.huggingface.families import random_tokens

CUT = torch.tensor([[5, 6, 7, 0, 1, 2, 3]])  # the end of one document, then another


def tensor(value: Any) -> Tensor | None:
    return None if value is None else torch.tensor(value)


@pytest.mark.parametrize(
    ("mask", "positions", "documents"),
    [
        (None, [[5, 6, 0, 1]], [[0, 0, 1, 1]]),
        (None, [[5, 6, 7, 8]], [[0, 0, 0, 0]]),
        (None, [[5, 0, 0, 1]], [[0, 1, 2, 2]]),
        ([[1, 1, 1, 0]], [[9, 0, 1, 0]], [[0, 1, 1, -1]]),
        ([[0, 1, 1, 1]], [[1, 0, 1, 0]], [[-1, 0, 0, 1]]),
        ([[0, 1, 1, 1]], [[1, 4, 0, 1]], [[-1, 0, 1, 1]]),
        ([[0, 0, 0, 0]], [[0, 0, 0, 0]], [[-1, -1, -1, -1]]),
    ],
)
def test_a_row_may_begin_inside_a_document(mask: Any, positions: Any, documents: Any) -> None:
    found = describe_rows(torch.zeros(1, 4, dtype=torch.long), tensor(mask), tensor(positions))
    assert found.positions_BT is not None and found.positions_BT.tolist() == positions
    assert found.documents_BT is not None and found.documents_BT.tolist() == documents


@pytest.mark.parametrize(
    ("mask", "positions", "message"),
    [
        ([[1, 0, 1, 1]], None, "attention_mask: row 0 has padding between its tokens"),
        ([[0, 1, 0, 1]], [[0, 0, 0, 1]], "attention_mask: row 0 has padding between its tokens"),
        (None, [[0, 1, 1, 2]], "position_ids: row 0 has 1 after 1; with latent feedback positions go on by one"),
        (None, [[0, 1, 5, 6]], "position_ids: row 0 has 5 after 1"),
        (None, [[7, 8, 3, 4]], "position_ids: row 0 has 3 after 8"),
        (None, [[-1, 0, 1, 2]], "position_ids: row 0 has -1;"),
        (None, [[[0, 1, 2, 3]]] * 3, r"position_ids has shape \[3, 1, 4\], the tokens \[1, 4\]"),
        (None, [[0, 1]], r"position_ids has shape \[1, 2\]"),
    ],
)
def test_rows_that_say_too_little_are_refused_by_name(mask: Any, positions: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        describe_rows(torch.zeros(1, 4, dtype=torch.long), tensor(mask), tensor(positions))
    with pytest.raises(ValueError, match="attention_mask has type dict, the tokens"):
        describe_rows(torch.zeros(1, 4, dtype=torch.long), {"full_attention": torch.ones(1, 1, 4, 4)})  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "native"])
@pytest.mark.parametrize("passes", [1, "exact"])
@torch.no_grad()
def test_the_end_of_one_document_says_nothing_to_the_next(family: str, passes: int | str) -> None:
    model, tokens = shared(family), random_tokens(1, 7)
    changed = torch.cat([(tokens[:, :3] + 1) % 29, tokens[:, 3:]], dim=1)
    documents = describe_rows(tokens, None, CUT).documents_BT
    packed, other = (read(model, row, passes, CUT, documents) for row in (tokens, changed))
    assert torch.equal(packed[:, 3:], other[:, 3:]) and (packed - other)[:, :3].abs().max() > 1e-3
    assert_near(packed[:, 3:], read(model, tokens[:, 3:], passes))
    model = make(family, feedback_passes=passes)
    assert_near(model(tokens, position_ids=CUT).logits[:, 3:], model(tokens[:, 3:]).logits)


@pytest.mark.parametrize("family", ["llama", "native"])
def test_training_on_it_is_training_on_each(family: str) -> None:
    """The loss of a packed row that begins inside a document is that of its parts."""

    def loss(tokens: Tensor, positions: Tensor) -> Tensor:
        model = make(family, feedback={"schedule": [{"fraction": 1.0, "passes": {2: 1.0}}], "jitter": 0.0, "prefix": "off"}).train()
        return model(tokens, position_ids=positions, labels=tokens, num_items_in_batch=1).loss

    tokens = random_tokens(1, 7)
    apart = loss(tokens[:, :3], CUT[:, :3]) + loss(tokens[:, 3:], CUT[:, 3:])
    assert_near(loss(tokens, CUT), apart)


def test_a_hole_in_the_mask_is_refused_where_it_would_leak() -> None:
    model, mask = make("llama", feedback_passes=1), torch.tensor([[1, 1, 0, 1, 1, 1, 1]] * 2)
    for training in (False, True):
        with pytest.raises(ValueError, match="attention_mask: row 0 has padding between its tokens"):
            model.train(training)(PADDED, attention_mask=mask, labels=PADDED)
    model.eval().config.feedback_passes = 0
    with torch.no_grad():
        assert torch.equal(model(PADDED, attention_mask=mask).logits, model.trunk.lm(PADDED, attention_mask=mask).logits)


def evaluated(model: FullBandForCausalLM, **given: Any) -> Any:
    return model.eval()(PADDED, **given)


def trained(model: FullBandForCausalLM, **given: Any) -> Any:
    return model.train()(PADDED, labels=PADDED, **given)


def decoded(model: FullBandForCausalLM, **given: Any) -> Any:
    return model.eval()(PADDED, cache=FeedbackCache(), **given)


@pytest.mark.parametrize("call", [evaluated, trained, decoded])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pixel_values", torch.ones(1, 3, 2, 2)),
        ("token_type_ids", torch.ones_like(PADDED)),
        ("output_router_logits", True),
        ("output_attentions", True),
        ("cu_seq_lens_q", torch.tensor([0, 7])),
        ("inputs_embeds", torch.zeros(2, 7, 16)),
        ("atention_mask", torch.ones_like(PADDED)),
        ("task_ids", 3),
    ],
)
def test_what_would_be_ignored_is_refused_by_name(call: Callable[..., Any], name: str, value: Any) -> None:
    for family in ("llama", "native"):
        with pytest.raises(ValueError, match=name):
            call(make(family, feedback_passes=1), **{name: value})


@torch.no_grad()
def test_what_says_nothing_is_passed_over() -> None:
    model = make("llama", feedback_passes=1)
    nothing: dict[str, Any] = dict(token_type_ids=torch.zeros_like(PADDED), output_attentions=False, pixel_values=None, use_cache=False)
    assert torch.equal(evaluated(model, **nothing).logits, evaluated(model).logits)
    positions = torch.arange(7).expand(2, 7)
    packing = dict(cu_seq_lens_q=torch.tensor([0, 7, 14]), max_length_q=7, position_ids=positions)
    assert torch.equal(evaluated(model, **packing).logits, evaluated(model).logits)
    with pytest.raises(ValueError, match="token_type_ids"):  # gpt2 adds an embedding for type 0 too
        evaluated(make("gpt2", feedback_passes=1), token_type_ids=torch.zeros_like(PADDED))
    with pytest.raises(ValueError, match="labels: a FeedbackCache goes on from prompts"):
        decoded(model, labels=PADDED)
    with pytest.raises(ValueError, match="cache: a text is computed whole"):
        trained(model, past_key_values=object())


def test_the_auxiliary_loss_of_experts_is_not_left_out() -> None:
    """It is computed where the source is, and else refused, whether the call or the config asks for it."""
    model = make("qwen3_moe", shape=dict(router_aux_loss_coef=0.5), feedback_passes=1)
    trained(model), evaluated(model, labels=PADDED)
    model.config.trunk_config.output_router_logits = True
    for call in (trained, lambda model: evaluated(model, labels=PADDED)):
        with pytest.raises(ValueError, match=r"output_router_logits: .* set model.config.trunk_config.output_router_logits=False"):
            call(model)
    model.config.feedback_passes = 0
    assert evaluated(model, labels=PADDED).aux_loss is not None
    backbone = make("qwen3_moe").base_model
    with pytest.raises(ValueError, match="output_router_logits"):
        backbone(PADDED, output_router_logits=True)
