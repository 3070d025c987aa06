"""lm-eval's rules of encoding: what stands before a text, and what stands in for an empty one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fullband.data.chat_template import ChatTemplate
from fullband.data.tokenizers import ByteTokenizer, TaskTokenizer
from fullband.evaluate.harness.model import FullBandLM
from fullband.evaluate.harness.text import HarnessText
from hf.sources import byte_tokenizer


@pytest.fixture
def with_lead(tmp_path: Path) -> HarnessText:
    """A tokenizer whose own rule puts <s> before every text."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 256)])
    tokenizer.save_pretrained(tmp_path)
    return HarnessText.of_folder(tmp_path)


def test_a_tokenizers_own_beginning_is_added_once(with_lead: HarnessText) -> None:
    ids = with_lead.encode("ab")
    assert ids[0] == 256 and ids[1:] == with_lead.encode("ab", special=False)
    assert with_lead.encode("<|im_start|>ab") == ids
    assert (with_lead.prefix, with_lead.stops) == (256, [257])
    assert with_lead.decode([*ids, 257]) == "ab"


def test_it_is_what_transformers_does(with_lead: HarnessText, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("", "ab", " a\n\nb", "é→🙂"):
        assert with_lead.encode(text) == theirs.encode(text)
        assert with_lead.encode(text, special=False) == theirs.encode(text, add_special_tokens=False)


def test_add_bos_token(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    assert HarnessText.of_folder(tmp_path).encode("a") == HarnessText.of_folder(tmp_path, add_bos=False).encode("a")
    assert HarnessText.of_folder(tmp_path, add_bos=True).encode("a")[0] == 256
    with pytest.raises(ValueError, match="names no beginning of sequence"):
        HarnessText(ByteTokenizer(), add_bos=True)


def test_our_own_tokenizers() -> None:
    text = HarnessText(ByteTokenizer(), ChatTemplate())
    assert (text.encode("a"), text.prefix, text.stops) == ([97], 256, [256])
    without = HarnessText(TaskTokenizer("s3", ["0", "1"]))
    assert (without.prefix, without.stops) == (None, [])


def lm_of(template: str, **parts: object) -> FullBandLM:
    lm = FullBandLM.__new__(FullBandLM)
    vars(lm).update({"text": HarnessText(ByteTokenizer(), ChatTemplate(template, is_own=True)), **parts})
    return lm


CLOSING = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CLOSING


@pytest.mark.parametrize("begun", ["The answer is", "The answer is "])
def test_a_prefilled_turn_stays_open_as_in_transformers(begun: str) -> None:
    chat = [{"role": "user", "content": "The answer is"}, {"role": "assistant", "content": begun}]
    theirs = byte_tokenizer().apply_chat_template(chat, chat_template=CLOSING, tokenize=False, continue_final_message=True)
    assert lm_of(CLOSING).apply_chat_template(chat, add_generation_prompt=False) == theirs
    assert theirs.rstrip() == "<user>The answer is<end><assistant>The answer is"


def test_a_template_without_a_system_role_gets_the_rest(recwarn: pytest.WarningsRecorder) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert lm_of(NO_SYSTEM).apply_chat_template(chat) == "<user>hi<end><assistant>"
    assert "system message" in str(recwarn.pop().message)
    with pytest.raises(ValueError, match="refuses this conversation"):
        lm_of("{{ raise_exception('no') }}").apply_chat_template(chat)


@pytest.mark.parametrize(
    ("context", "answer", "why"),
    [
        ("a", "", "the answer '' has no token to score"),
        ("", "", "the answer '' has no token to score"),
        (" ", "b", "the answer 'b' follows a context without a token"),  # lm-eval gives the context's last spaces to the answer
        ("a", " b" * 90, "has 180 tokens and does not fit the model's context of 96"),
    ],
)
def test_an_answer_that_cannot_be_scored_is_refused_with_its_task_and_document(context: str, answer: str, why: str) -> None:
    from lm_eval.api.instance import Instance

    asked = [("a", " b"), (context, answer)]
    requests = [Instance("loglikelihood", {}, args, 0, task_name="tiny", doc_id=3, metadata=("tiny", 3, 1)) for args in asked]
    lm = lm_of(CLOSING)
    lm.limit = 96
    with pytest.raises(ValueError, match=f"tiny, document 3: the answer .*{re.escape(why.removeprefix('the answer '))}"):
        lm.loglikelihood(requests, disable_tqdm=True)


@pytest.mark.parametrize("sampling", [False, True])
def test_a_repetition_penalty_counts_without_sampling_too(sampling: bool) -> None:
    settings, _ = lm_of(CLOSING)._settings(
        {"until": ["x"], "do_sample": sampling, "temperature": 0.7, "repetition_penalty": 1.3, "top_p": 0.9}
    )
    assert settings["repetition_penalty"] == 1.3
    assert settings.get("top_p") == (0.9 if sampling else None)


def test_an_answer_keeps_its_first_space(tmp_path: Path) -> None:
    from data.test_beginning import llama_like

    text = HarnessText.of_folder(llama_like(tmp_path))
    prompt = text.encode("the")
    assert text.decode([*text.tokenizer.follow("the", " end"), 2], prompt) == " end"


@pytest.mark.parametrize("special", [None, True])
def test_a_beginning_that_is_written_out_is_not_doubled(tmp_path: Path, special: bool | None) -> None:
    from data.test_beginning import llama_like

    text = HarnessText.of_folder(llama_like(tmp_path))
    assert text.encode("<s>the", special) == text.encode("<s>the", False)
    assert text.encode("the", special) == [1, *text.encode("the", False)]
