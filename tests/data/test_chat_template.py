"""Chat templates: where they are found, and what they make of a conversation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fullband.data.chat_template import CHATML, ChatTemplate, Message, load_chat_template

TALK: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hi <3"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "bye"},
]
CHATML_TEXT = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi <3<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
    "<|im_start|>user\nbye<|im_end|>\n"
)


def test_chatml_where_there_is_none(tmp_path: Path) -> None:
    template = load_chat_template(tmp_path)
    assert not template.is_own and template.source == CHATML and template.stop == "<|im_end|>"
    assert template.render(TALK, add_generation_prompt=False) == CHATML_TEXT
    assert template.render(TALK) == CHATML_TEXT + "<|im_start|>assistant\n"


@pytest.mark.parametrize("place", ["file", "settings", "named"])
def test_the_tokenizers_own_wherever_it_stands(tmp_path: Path, place: str) -> None:
    source = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}:{{ m['content'] | tojson }}]{% endfor %}{{ eos_token }}"
    settings: dict[str, Any] = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "unk_token": None}
    if place == "file":
        (tmp_path / "chat_template.jinja").write_text(source)
        settings["chat_template"] = "not this one"
    elif place == "settings":
        settings["chat_template"] = source
    else:
        settings["chat_template"] = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": source}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    template = load_chat_template(tmp_path)
    assert template.is_own and template.stop is None
    assert template.render(TALK[1:2]) == '<s>[user:"hi <3"]</s>'


def test_the_dialect_of_hugging_face() -> None:
    source = (
        "{% for m in messages %}\n    {% if m['role'] == 'system' %}{% continue %}{% endif %}\n"
        "    {% generation %}{{ m['content'] }}{% endgeneration %}\n{% endfor %}{{ strftime_now('%%') }}"
    )
    assert ChatTemplate(source).render(TALK[:2]).split() == ["hi", "<3%"]


def test_the_same_as_transformers() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = (
        "{%- if messages[0]['role'] == 'system' -%}\n  {%- set system = messages[0]['content'] -%}\n  {%- set rest = messages[1:] -%}\n"
        "{%- endif %}\n{{ bos_token }}\n{% for m in rest %}\n    {% if loop.first %}{{ system | trim }}\n    {% endif %}\n"
        "  {{ m.role }}: {{ m.content | tojson }}\n{% endfor %}\n{% if add_generation_prompt %}assistant:{% endif %}"
    )
    ((expected,), _) = render_jinja_template([TALK], chat_template=source, add_generation_prompt=True, bos_token="<s>")
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(TALK) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses this conversation: roles must alternate"),
        ("{% for m in", "not valid Jinja"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses this conversation"),  # a template is not trusted
    ],
)
def test_what_a_template_may_not_do(source: str, expected: str) -> None:
    with pytest.raises(ValueError) as refused:
        ChatTemplate(source).render(TALK)
    assert expected in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ messages[0]['content'] + 1 }}", "TypeError: can only concatenate str"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{% include 'other' %}", "TypeError: no loader"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "RecursionError: maximum recursion depth"),
        ("{{ range(10 ** 12) | list }}", "OverflowError: "),
        ("{{ messages[0].content.nothing() }}", "has no attribute 'nothing'"),
        ("{{ messages[99].role }}", "has no element 99"),
        ("{{ 'x'.encode('no-such-codec') }}", "LookupError: "),
    ],
)
def test_a_template_that_fails_is_one_line(source: str, reason: str) -> None:
    with pytest.raises(ValueError, match=r"^the chat template (fails on|refuses) this conversation: ") as refused:
        ChatTemplate(source).render(TALK)
    assert reason in str(refused.value) and "\n" not in str(refused.value)


def test_tools_and_documents_are_there_and_none(tmp_path: Path) -> None:
    """As transformers renders: a template may ask whether there are some without asking whether they are defined."""
    asked = "{% if tools is not none %}tools{% endif %}{{ documents is none }}{% if tools %}{% endif %}{{ tools is defined }}"
    assert ChatTemplate(asked).render(TALK) == "TrueTrue"


@pytest.mark.parametrize("content", ["the", " the ", "", " ", "e", "<e>", "user"])
@pytest.mark.parametrize("written", ["m['content']", "m['content']|trim"])
def test_an_open_turn_ends_where_transformers_ends_it(written: str, content: str) -> None:
    transformers = pytest.importorskip("transformers")
    from hf.sources import byte_tokenizer

    source = "{% for m in messages %}{{ '<' + m['role'] + '>' + " + written + " + '<end>\n' }}{% endfor %}"
    messages = [{"role": "user", "content": "e?"}, {"role": "assistant", "content": content}]
    theirs = byte_tokenizer()
    assert isinstance(theirs, transformers.PreTrainedTokenizerBase)
    expected = theirs.apply_chat_template(messages, chat_template=source, tokenize=False, continue_final_message=True)
    assert ChatTemplate(source).render_open(messages) == expected  # type: ignore[arg-type]
