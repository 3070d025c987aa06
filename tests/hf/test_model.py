"""`forward()` in evaluation: without feedback passes it is the source bit for bit, with them the reading that the rest of fullband does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import fullband.decode as decode
from fullband.hf import FeedbackCache, FullBandForCausalLM
from fullband.hf.versions import CACHE
from hf.models import MASK, PADDED, PROMPTS, assert_near, make, shared
from reference.seam import read

BEHIND = torch.tensor([prompt + [0] * (7 - len(prompt)) for prompt in PROMPTS])
BEHIND_MASK = MASK.flip(1)


@pytest.fixture
def reads_with() -> Any:
    """The shared models, with other feedback passes while the test runs."""
    changed: list[FullBandForCausalLM] = []

    def with_passes(family: str, passes: int | str) -> FullBandForCausalLM:
        model = shared(family)
        model.config.feedback_passes = passes
        changed.append(model)
        return model

    yield with_passes
    for model in changed:
        model.config.feedback_passes = 0


SOURCE_OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "left padding": dict(attention_mask=MASK),
    "right padding": dict(attention_mask=BEHIND_MASK),
    "4-D mask": dict(attention_mask=torch.zeros(2, 1, 7, 7, dtype=torch.float64).masked_fill(~torch.ones(7, 7).tril().bool(), -1e9)),
    "positions": dict(position_ids=torch.arange(3, 10)[None]),
    "last logits": dict(logits_to_keep=2),
    "chosen logits": dict(logits_to_keep=torch.tensor([1, 4])),
    "hidden states": dict(output_hidden_states=True),
    "labels": dict(labels=PADDED),
    "sum": dict(labels=PADDED, num_items_in_batch=5),
}


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_without_feedback_passes_forward_is_the_sources(family: str) -> None:
    model = shared(family)
    for name, options in SOURCE_OPTIONS.items():
        ours, theirs = model(PADDED, **options), model.trunk.lm(PADDED, **options)
        assert torch.equal(ours.logits, theirs.logits), name
        assert ours.loss == theirs.loss and (ours.loss is None) == ("labels" not in options)
        if "output_hidden_states" in options:
            assert all(torch.equal(a, b) for a, b in zip(ours.hidden_states, theirs.hidden_states, strict=True))
    first = model(PADDED[:, :5], use_cache=True)
    assert isinstance(first[CACHE], DynamicCache)
    second = model(PADDED[:, 5:], **{CACHE: first[CACHE]})
    assert_near(torch.cat([first.logits, second.logits], dim=1), model(PADDED).logits)
    embeddings = model.get_input_embeddings()(PADDED)
    assert torch.equal(model(inputs_embeds=embeddings).logits, model.trunk.lm(inputs_embeds=embeddings).logits)
    assert isinstance(model(PADDED, return_dict=False), tuple)


@torch.no_grad()
@pytest.mark.parametrize("tokens, mask", [(PADDED, MASK), (BEHIND, BEHIND_MASK)], ids=["left", "right"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "native"])
@pytest.mark.parametrize("passes", [0, 1, 2, "exact", "converged"])
def test_padded_rows_are_read_as_single_rows(family: str, passes: Any, tokens: Tensor, mask: Tensor, reads_with: Any) -> None:
    model = reads_with(family, passes)
    logits = model(tokens, attention_mask=mask).logits
    for row, prompt in enumerate(PROMPTS):
        expected = model.trunk.head(read(model, torch.tensor([prompt]), passes))[0]
        assert_near(logits[row, mask[row].bool()], expected)


@torch.no_grad()
def test_labels_give_the_loss_of_the_configured_reading(reads_with: Any) -> None:
    for passes in (0, 2):
        model = reads_with("native", passes)
        labels = PADDED.masked_fill(MASK == 0, -100)
        output = model(PADDED, attention_mask=MASK, labels=labels)
        scored = [
            torch.nn.functional.cross_entropy(
                model.trunk.head(read(model, torch.tensor([p]), passes))[0, :-1], torch.tensor(p[1:]), reduction="sum"
            )
            for p in PROMPTS
        ]
        assert_near(output.loss, sum(scored) / sum(len(p) - 1 for p in PROMPTS))
        assert_near(model(PADDED, attention_mask=MASK, labels=labels, num_items_in_batch=4).loss, sum(scored) / 4)
        last = model(PADDED, attention_mask=MASK, labels=labels, logits_to_keep=3, num_items_in_batch=1)
        assert last.logits.shape[1] == 3 and 0 < last.loss < sum(scored)


@torch.no_grad()
def test_packed_rows_and_chosen_logits(reads_with: Any) -> None:
    model = reads_with("llama", 1)
    tokens = torch.tensor([PROMPTS[0] + PROMPTS[1]])
    positions = torch.tensor([[*range(len(PROMPTS[0])), *range(len(PROMPTS[1]))]])
    logits = model(tokens, position_ids=positions).logits[0]
    expected = torch.cat([model.trunk.head(read(model, torch.tensor([prompt]), 1))[0] for prompt in PROMPTS])
    assert_near(logits, expected)
    assert_near(model(tokens, position_ids=positions, logits_to_keep=3).logits[0], expected[-3:])
    assert_near(model(tokens, position_ids=positions, logits_to_keep=torch.tensor([2])).logits[0], expected[[2]])


def test_gradients_flow_through_the_passes(reads_with: Any) -> None:
    model = reads_with("native", 1)
    model(PADDED, labels=PADDED).loss.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.connection.parameters())
    model.zero_grad(set_to_none=True)


REFUSED: list[tuple[str, Any, dict[str, Any], str]] = [
    ("llama", 1, dict(output_hidden_states=True), "output_hidden_states"),
    ("llama", 1, dict(output_attentions=True), "output_attentions"),
    ("native", 0, dict(output_hidden_states=True), "fullband.diagnose"),
    ("llama", 1, dict(use_cache=True), "use_cache"),
    ("llama", 1, {CACHE: DynamicCache()}, "FeedbackCache"),
    ("llama", 1, dict(input_ids=None, inputs_embeds=torch.zeros(2, 7, 16)), "input_ids are needed"),
    ("llama", 1, dict(attention_mask=torch.zeros(2, 1, 7, 7)), "2-D"),
    ("llama", 1, dict(attention_mask=torch.ones(2, 5)), "attention_mask has shape"),
    ("native", "converged", dict(position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3]])), "one document a sequence"),
    ("native", -1, {}, "feedback_passes is 0, 1, 2"),
    ("native", 1, dict(input_ids=torch.ones(1, 60, dtype=torch.long)), "do not fit"),
]


@pytest.mark.parametrize("family, passes, options, message", REFUSED, ids=[f"{r[0]}-{next(iter(r[2]), r[1])}-{r[1]}" for r in REFUSED])
def test_what_cannot_be_read_is_refused(family: str, passes: Any, options: dict[str, Any], message: str, reads_with: Any) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        reads_with(family, passes)(**(dict(input_ids=PADDED) | options))
    assert "\n" not in str(caught.value)


@torch.no_grad()
@pytest.mark.parametrize("mode, passes", [("soft", None), ("fused", "exact"), ("standard", None)])
def test_a_policys_answers_are_scored_as_they_were_generated(mode: str, passes: Any) -> None:
    model = make("native", score_as_generated=True, latent_feedback_mode=mode)
    model.generation_config.feedback_passes = passes
    answers = [[3, 17, 8, 2], [11, 5]]
    tokens = torch.cat([PADDED, torch.tensor([answer + [0] * (4 - len(answer)) for answer in answers])], dim=1)
    mask = torch.cat([MASK, (torch.arange(4) < torch.tensor([[4], [2]])).long()], dim=1)
    logits = model(tokens, attention_mask=mask, logits_to_keep=5).logits[:, :-1].log_softmax(-1)
    for row, answer in enumerate(answers):
        (expected,) = decode.answer_logprobs(model, [PROMPTS[row]], [answer], mode, passes)["exact"]
        assert_near(logits[row, range(len(answer)), answer], expected)
    if mode == "soft":
        with pytest.raises(ValueError, match="logits_to_keep"):
            model(tokens, attention_mask=mask)
        for kept in (1, tokens.shape[1] + 1):
            with pytest.raises(ValueError, match="the prompt is 1 … "):
                model(tokens, attention_mask=mask, logits_to_keep=kept)


def test_embeddings_and_head_are_the_trunks() -> None:
    model = make("llama")
    assert model.get_input_embeddings() is model.trunk.lm.get_input_embeddings()
    assert model.get_output_embeddings() is model.trunk.lm.get_output_embeddings()
    model.resize_token_embeddings(40, mean_resizing=False)
    assert model.trunk.vocab_size == model.config.vocab_size == 40 and model(PADDED).logits.shape[-1] == 40
    assert decode.generate(model, [[39, 3]], "soft", max_new_tokens=2)
    native = shared("native")
    assert native.get_output_embeddings() is None
    for change in (lambda: native.resize_token_embeddings(40), lambda: native.set_input_embeddings(torch.nn.Embedding(3, 3))):
        with pytest.raises(ValueError, match=r"App\. A"):
            change()


@pytest.mark.parametrize("family", ["llama", "native"])
def test_checkpointing_of_activations_changes_no_gradient(family: str) -> None:
    models = [make(family, feedback={"jitter": 0.0}).train() for _ in range(2)]
    models[1]._set_gradient_checkpointing(True)
    for model in models:
        model(PADDED, labels=PADDED).loss.backward()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert_near(one.grad, other.grad)


def test_a_feedback_cache_moves_state_and_cache_together() -> None:
    model, cache = shared("gemma3_text"), FeedbackCache("soft")
    with pytest.raises(ValueError, match="no prompt"):
        cache.reorder_cache(torch.tensor([0]))
    with torch.no_grad():
        model(PADDED, attention_mask=MASK, cache=cache)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0]))
        assert cache.batch_size == 2 and cache.get_seq_length() == 7
        logits = model(torch.tensor([[3, 9], [6, 2]]), cache=cache).logits
    for row, (prompt, new) in enumerate([(PROMPTS[1], [3, 9]), (PROMPTS[0], [6, 2])]):
        state = decode.prefill(model, [prompt])
        for place, token in enumerate(new):
            state = decode.step(model, state, torch.tensor([token]), decode.resolve_mode("soft"))
            assert_near(logits[row, place], model.trunk.head(state.top_BD)[0])
    with pytest.raises(ValueError, match="context of 48"), torch.no_grad():
        model(torch.ones(2, 45, dtype=torch.long), cache=cache)
