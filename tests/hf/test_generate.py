"""`generate()` in every mode: transformers' loops around fullband's recurrence give what the slow sequential reference gives."""

from __future__ import annotations

import warnings
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

import fullband.decode as decode
from fullband.hf import FeedbackCache
from fullband.hf.versions import CACHE
from hf.models import FAMILIES, MASK, PADDED, PROMPTS, assert_near, make, shared, slow_logits

MODES = [("soft", None), ("fused", 2), ("fused", "exact")]
QUICK = [family for family in FAMILIES if family != "falcon_h1"]  # whose layers are slow here
LENGTH = PADDED.shape[1]
FREE: dict[str, Any] = dict(attention_mask=MASK, do_sample=False, eos_token_id=None, pad_token_id=0, max_new_tokens=5)
TOLD: dict[str, Any] = dict(return_dict_in_generate=True, output_logits=True, output_scores=True)


def passes_of(mode: str, passes: Any) -> Any:
    return passes if mode == "fused" else 0


@pytest.mark.parametrize("family, mode, passes", [*((family, *mode) for family, mode in product(QUICK, MODES)), ("falcon_h1", "fused", 1)])
def test_a_left_padded_batch_is_the_slow_reference_row_by_row(family: str, mode: str, passes: Any) -> None:
    model, count = shared(family), 2 if family == "falcon_h1" else 5
    settings = FREE | TOLD | dict(max_new_tokens=count)
    out = model.generate(PADDED, latent_feedback_mode=mode, feedback_passes=passes, **settings)
    made = out.sequences[:, LENGTH:]
    logits = torch.stack(out.logits, dim=1)
    for row, prompt in enumerate(PROMPTS):
        expected = slow_logits(model, prompt, made[row, :-1].tolist(), passes_of(mode, passes))
        assert_near(logits[row], expected)
        assert made[row].tolist() == expected.argmax(-1).tolist()
    ours = decode.generate(model, PROMPTS, mode, passes, max_new_tokens=count)
    assert [completion.tokens for completion in ours] == made.tolist()


@pytest.mark.parametrize(
    "family, options",
    [
        ("llama", {"num_beams": 3}),
        ("gemma3_text", {}),
        ("gemma3_text", {"do_sample": True, "num_return_sequences": 2}),
        ("falcon_h1", {"max_new_tokens": 2}),
    ],
)
def test_standard_is_the_sources_own_generate_bit_for_bit(family: str, options: dict[str, Any]) -> None:
    model, source = shared(family), make(family).trunk.lm
    settings = FREE | TOLD | options
    torch.manual_seed(3)
    ours = model.generate(PADDED, latent_feedback_mode="standard", **settings)
    torch.manual_seed(3)
    theirs = source.generate(PADDED, **settings)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert all(torch.equal(a, b) for a, b in zip(ours.logits, theirs.logits, strict=True))


def test_standard_of_a_native_model_feeds_nothing_back() -> None:
    model = shared("native")
    out = model.generate(PADDED, latent_feedback_mode="standard", **FREE, **TOLD)
    for row, prompt in enumerate(PROMPTS):
        expected = slow_logits(model, prompt, out.sequences[row, LENGTH:-1].tolist(), 0, feeds_back=False)
        assert_near(torch.stack(out.logits, dim=1)[row], expected)


def slow_beams(model: Any, prompt: list[int], beams: int, count: int) -> list[tuple[float, list[int]]]:
    """The best `beams` continuations in soft, by mean log-probability, every one decoded from nothing."""
    kept: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(count):
        longer = []
        for score, new in kept:
            scores = slow_logits(model, prompt, new, 0)[-1].log_softmax(-1)
            longer += [(score + float(value), [*new, token]) for token, value in enumerate(scores)]
        kept = sorted(longer, reverse=True)[:beams]
    return [(score / count, new) for score, new in kept]


@pytest.mark.parametrize("family", ["llama", "native"])
def test_beam_search_reorders_cache_and_top_state_together(family: str) -> None:
    model, beams, count = shared(family), 3, 4
    settings = FREE | TOLD | dict(num_beams=beams, num_return_sequences=beams, max_new_tokens=count)
    out = model.generate(PADDED, latent_feedback_mode="soft", **settings)
    assert (out.beam_indices[:, 1:] % beams != torch.arange(beams).repeat(2)[:, None]).any(), "no beam moved: nothing was tested"
    for row, prompt in enumerate(PROMPTS):
        expected = slow_beams(model, prompt, beams, count)
        here = slice(row * beams, (row + 1) * beams)
        assert out.sequences[here, LENGTH:].tolist() == [new for _, new in expected]
        assert_near(out.sequences_scores[here], torch.tensor([score for score, _ in expected]))


@pytest.mark.parametrize("family", ["gemma3_text", "native"])
def test_every_sample_of_a_prompt_goes_on_from_its_own_state(family: str) -> None:
    model = shared(family)
    torch.manual_seed(0)
    settings = FREE | TOLD | dict(do_sample=True, num_return_sequences=3, latent_feedback_mode="fused")
    out = model.generate(PADDED, **settings)
    made = out.sequences[:, LENGTH:].tolist()
    assert len({tuple(new) for new in made}) == 6
    for row, new in enumerate(made):
        assert_near(torch.stack(out.logits, dim=1)[row], slow_logits(model, PROMPTS[row // 3], new[:-1], 1))


@pytest.mark.parametrize("family, mode, passes", [("gemma3_text", "fused", 2), ("llama", "soft", None), ("native", "fused", "exact")])
def test_chunks_and_no_cache_change_nothing(family: str, mode: str, passes: Any) -> None:
    model = shared(family)
    settings = FREE | TOLD | dict(latent_feedback_mode=mode, feedback_passes=passes, max_new_tokens=3)
    whole = model.generate(PADDED, **settings)
    for other in (model.generate(PADDED, prefill_chunk_size=2, **settings), model.generate(PADDED, use_cache=False, **settings)):
        assert torch.equal(whole.sequences, other.sequences)
        assert_near(torch.stack(other.logits), torch.stack(whole.logits))


def test_beams_without_a_cache_are_the_same_beams() -> None:
    settings = FREE | TOLD | dict(num_beams=2, latent_feedback_mode="fused", max_new_tokens=3)
    one, other = (shared("llama").generate(PADDED, use_cache=cached, **settings) for cached in (True, False))
    assert torch.equal(one.sequences, other.sequences)
    assert_near(one.sequences_scores, other.sequences_scores)


def test_converged_prompts() -> None:
    model = shared("llama")
    out = model.generate(PADDED, latent_feedback_mode="fused", feedback_passes="converged", **FREE)
    ours = decode.generate(model, PROMPTS, "fused", "converged", max_new_tokens=5)
    assert out[:, LENGTH:].tolist() == [completion.tokens for completion in ours]


class Collected(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


class Forbid(LogitsProcessor):
    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.tensor([self.token]), -torch.inf)


def test_streamer_processor_and_stopping_criterion() -> None:
    model, prompt = shared("llama"), torch.tensor(PROMPTS[1:])
    settings = FREE | dict(attention_mask=None)
    free = model.generate(prompt, **settings)[0, LENGTH:].tolist()
    streamer = Collected()
    out = model.generate(
        prompt,
        streamer=streamer,
        logits_processor=LogitsProcessorList([Forbid(free[1])]),
        stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(LENGTH + 3)]),
        **settings,
    )
    assert streamer.tokens == out[0].tolist() and streamer.ended
    new = out[0, LENGTH:].tolist()
    assert len(new) == 3 and new[0] == free[0] and free[1] not in new


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 3.0},
        {"repetition_penalty": 3.0, "num_beams": 2, "num_return_sequences": 2},
        {"no_repeat_ngram_size": 1},
        {"encoder_repetition_penalty": 0.3},
        {"encoder_no_repeat_ngram_size": 1},
        {"sequence_bias": [[[0], -50.0]]},
    ],
    ids=str,
)
def test_processors_that_look_back_see_no_padding(options: dict[str, Any], side: str) -> None:
    """Padding is id 5, which a row that counts it would not choose; each row alone is what it is in the batch."""
    model, count = shared("llama"), options.get("num_return_sequences", 1)
    longest = max(map(len, PROMPTS))
    rows, masks = [], []
    for prompt in PROMPTS:
        fill = [5] * (longest - len(prompt))
        rows.append([*prompt, *fill] if side == "right" else [*fill, *prompt])
        real, padding = [1] * len(prompt), [0] * len(fill)
        masks.append([*real, *padding] if side == "right" else [*padding, *real])
    settings = FREE | dict(pad_token_id=5, latent_feedback_mode="soft") | options
    together = model.generate(torch.tensor(rows), **settings | {"attention_mask": torch.tensor(masks)})[:, longest:]
    for row, prompt in enumerate(PROMPTS):
        alone = model.generate(torch.tensor([prompt]), **settings | {"attention_mask": torch.ones(1, len(prompt))})[:, len(prompt) :]
        assert together[row * count : (row + 1) * count].tolist() == alone.tolist()


def test_a_row_that_ends_is_padded_and_leaves_the_others_alone() -> None:
    model = shared("native")
    free = model.generate(PADDED, **FREE)[:, LENGTH:]
    end = int(free[0, 1])
    out = model.generate(PADDED, **(FREE | dict(eos_token_id=end)))[:, LENGTH:]
    assert out[0].tolist() == [*free[0, :2].tolist(), *[0] * (out.shape[1] - 2)]
    stopped = free[1].tolist().index(end) + 1 if end in free[1] else 5
    assert out[1, :stopped].tolist() == free[1, :stopped].tolist()


@pytest.mark.parametrize(
    "family, mode, passes", [("falcon_h1", "fused", 1), ("llama", "fused", "exact"), ("gemma3_text", "soft", None), ("native", "fused", 2)]
)
def test_a_later_turn_reads_the_answer_again_and_not_the_prompt(
    family: str, mode: str, passes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shared(family)
    settings = FREE | TOLD | dict(latent_feedback_mode=mode, feedback_passes=passes, max_new_tokens=2)
    first = model.generate(PADDED, **settings)
    turn = torch.cat([first.sequences, torch.tensor([[12, 13], [14, 15]])], dim=1)
    settings["attention_mask"] = torch.cat([MASK, torch.ones(2, turn.shape[1] - LENGTH, dtype=torch.long)], dim=1)
    fresh = model.generate(turn, **settings)
    read: list[int] = []
    above = model.trunk.above

    def counted(inputs: Tensor, *args: Any, **kwargs: Any) -> Any:
        read.append(inputs.shape[1])
        return above(inputs, *args, **kwargs)

    monkeypatch.setattr(model.trunk, "above", counted)
    again = model.generate(turn, **{CACHE: first[CACHE]}, **settings)
    assert torch.equal(again.sequences, fresh.sequences)
    assert_near(torch.stack(again.logits), torch.stack(fresh.logits))
    behind, decoded = turn.shape[1] - LENGTH, 1
    assert sum(read) == behind * (1 if passes == "exact" else 1 + passes_of(mode, passes)) + decoded


def test_a_cache_of_another_conversation_is_not_gone_on_with() -> None:
    model, settings = shared("llama"), FREE | TOLD
    first = model.generate(PADDED, **settings)
    other = PADDED.clone()
    other[:, -2] += 1
    turn = torch.cat([other, torch.tensor([[12], [14]])], dim=1)
    settings["attention_mask"] = torch.cat([MASK, torch.ones(2, 1, dtype=torch.long)], dim=1)
    assert torch.equal(model.generate(turn, **{CACHE: first[CACHE]}, **settings).sequences, model.generate(turn, **settings).sequences)


def test_a_loop_of_ones_own_around_forward() -> None:
    model, cache = shared("gemma3_text"), FeedbackCache("fused", 1)
    tokens, new = torch.tensor(PROMPTS[:1]), []
    with torch.no_grad():
        for _ in range(4):
            logits = model(tokens, cache=cache).logits[:, -1]
            tokens = logits.argmax(-1, keepdim=True)
            new.append(int(tokens))
    assert new == decode.generate(model, PROMPTS[:1], "fused", 1, max_new_tokens=4)[0].tokens


def test_mode_and_passes_come_from_the_nearest_place() -> None:
    model = make("native", latent_feedback_mode="standard")
    assert model.decoding_mode() == ("standard", None)
    model.generation_config.latent_feedback_mode, model.generation_config.feedback_passes = "fused", 3
    assert model.decoding_mode() == ("fused", 3)
    assert model.decoding_mode(GenerationConfig(feedback_passes=2)) == ("fused", 2)
    assert model.decoding_mode(GenerationConfig(latent_feedback_mode="soft")) == ("soft", None)
    assert model.decoding_mode(GenerationConfig(latent_feedback_mode="soft"), "fused") == ("fused", 3)
    settings = FREE | dict(max_new_tokens=4)
    ours = decode.generate(model, PROMPTS, "fused", 3, max_new_tokens=4)
    assert model.generate(PADDED, **settings)[:, LENGTH:].tolist() == [completion.tokens for completion in ours]
    explicit = GenerationConfig(latent_feedback_mode="soft", max_new_tokens=4, do_sample=False, pad_token_id=0)
    ours = decode.generate(model, PROMPTS, "soft", max_new_tokens=4)
    made = model.generate(PADDED, explicit, attention_mask=MASK)[:, LENGTH:].tolist()
    assert made == [completion.tokens for completion in ours]


REFUSED: list[tuple[dict[str, Any], str]] = [
    (dict(latent_feedback_mode="sof"), "unknown mode 'sof'"),
    (dict(feedback_passes=2), "needs the mode fused"),
    (dict(latent_feedback_mode="fused", feedback_passes=0), "at least 1 feedback pass"),
    (dict(prompt_lookup_num_tokens=2), "assisted decoding"),
    (dict(assistant_model=object()), "assisted decoding"),
    (dict(penalty_alpha=0.6, top_k=4), "contrastive search"),
    (dict(dola_layers="high"), "DoLa"),
    (dict(num_beams=4, num_beam_groups=2, diversity_penalty=0.5), "group_beam_search"),
    (dict(cache_implementation="static"), "cache_implementation='static'"),
    (dict(cache_implementation="offloaded"), "cache_implementation='offloaded'"),
    (dict(cache_implementation="quantized"), "cache_implementation='quantized'"),
    (dict(cache_implementation="paged"), "continuous batching"),
    ({CACHE: DynamicCache()}, "DynamicCache holds no top states"),
    (dict(custom_generate=lambda *a, **k: None), "custom_generate"),
    (dict(inputs_embeds=torch.zeros(2, 7, 16)), "takes input_ids"),
    (dict(position_ids=torch.arange(7)[None]), "leave position_ids out"),
    (dict(guidance_scale=2.0), "guidance_scale"),
    (dict(output_hidden_states=True, return_dict_in_generate=True), "output_hidden_states"),
    (dict(output_attentions=True, return_dict_in_generate=True), "output_attentions"),
    (dict(attention_mask=torch.ones(2, 9)), "give the whole conversation"),
    (dict(attention_mask=torch.zeros(2, 7)), "prompt 0 is empty"),
    (dict(max_newtokens=3), "max_newtokens"),
]


@pytest.mark.parametrize("options, message", REFUSED, ids=[next(iter(options)) + str(i) for i, (options, _) in enumerate(REFUSED)])
def test_what_cannot_work_is_refused_in_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        shared("llama").generate(PADDED, **(FREE | options))
    assert "\n" not in str(caught.value)


def test_continuous_batching_is_refused() -> None:
    for method in ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager"):
        with pytest.raises(ValueError, match="continuous batching"):
            getattr(shared("llama"), method)()


def test_a_feedback_cache_is_not_for_standard_nor_for_cutting() -> None:
    model = shared("llama")
    cache = model.generate(PADDED, **FREE, **TOLD)[CACHE]
    with pytest.raises(ValueError, match="standard"):
        model.generate(PADDED, latent_feedback_mode="standard", **{CACHE: cache}, **FREE)
    with pytest.raises(ValueError, match="not cut back"):
        cache.crop(1)


def test_generation_ends_at_the_context() -> None:
    model = shared("native")
    with pytest.warns(UserWarning, match="model's context of 48"):
        out = model.generate(PADDED, **(FREE | dict(max_new_tokens=100)))
    assert out.shape[1] == model.trunk.context
    with pytest.raises(ValueError, match="leaves no room"):
        model.generate(torch.ones(1, 49, dtype=torch.long), max_new_tokens=1)


def test_texts_made_with_feedback_and_scored_without_are_warned_about_once() -> None:
    model = make("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(PADDED)
        model.generate(PADDED, **FREE)
    with pytest.warns(UserWarning, match="scored without it"):
        model(PADDED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate(PADDED, **FREE)
        model(PADDED)
