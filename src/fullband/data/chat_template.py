"""Conversations as text: the template that came with a tokenizer, or ChatML.

Templates are Jinja, in the dialect of Hugging Face tokenizers, and run in a sandbox: a template comes with a checkpoint.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, TypedDict

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE_FILE = "chat_template.jinja"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_END = "<|im_end|>"
OPEN_END = "\ue000open end\ue000 "  # stands where a message is to be continued; no text holds it. The space shows whether a template trims


class Message(TypedDict):
    """One turn. `role` is system, user or assistant."""

    role: str
    content: str


class Generation(Extension):
    """{% generation %} … {% endgeneration %}, which marks answers for trainers, is its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template of conversations.

    source  its text
    tokens  names that it may use: bos_token, eos_token, …
    is_own  whether it came with the tokenizer
    stop    text that ends an answer, for tokenizers in which it is not one id; None = the tokenizer's stop ids end it
    """

    source: str = CHATML
    tokens: Mapping[str, str] = field(default_factory=dict)
    is_own: bool = False

    @property
    def stop(self) -> str | None:
        return CHATML_END if CHATML_END in self.source else None

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The conversation as text, which holds its special tokens written out; with `add_generation_prompt` up to where an answer begins.

        Raises ValueError in one line for a conversation that the template refuses (roles that do not alternate, …), and for a template
        that fails on it.
        """
        known: dict[str, Any] = {"messages": messages, "tools": None, "documents": None}  # as transformers names them to a template
        template = self._compiled
        try:
            text: str = template.render({**known, **self.tokens}, add_generation_prompt=add_generation_prompt)
        except TemplateError as error:
            raise ValueError(f"the chat template refuses this conversation: {_one_line(error)}") from None
        except Exception as error:  # a template is a program: it adds text to numbers, divides by zero, calls itself for ever
            raise ValueError(f"the chat template fails on this conversation: {type(error).__name__}: {_one_line(error)}") from None
        return text

    def render_open(self, messages: Sequence[Message]) -> str:
        """The conversation up to the end of its last message's content, which is to be continued. Raises ValueError as `render`, and
        for a template that does not write that content."""
        *before, last = messages
        whole = self.render([*before, Message(role=last["role"], content=last["content"] + OPEN_END)], add_generation_prompt=False)
        place = whole.rfind(OPEN_END.strip())
        if place < 0 or last["content"].strip() not in whole:
            raise ValueError("the chat template does not write the last message as it is: it cannot be continued")
        trimmed = not whole.startswith(OPEN_END, place)  # the template takes spaces off a message, so off its end here
        opened = whole[:place].replace(OPEN_END, "")
        return opened.rstrip() if trimmed else opened

    @cached_property
    def _compiled(self) -> Any:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda pattern: datetime.datetime.now().strftime(pattern)}
        try:
            return environment.from_string(self.source)
        except (TemplateError, RecursionError) as error:
            raise ValueError(f"the chat template is not valid Jinja: {_one_line(error)}") from None


def load_chat_template(folder: str | Path) -> ChatTemplate:
    """The template of a model or tokenizer folder: chat_template.jinja, or the one in tokenizer_config.json; ChatML if there is none."""
    folder = Path(folder)
    settings = _settings(folder / "tokenizer_config.json")
    named = {key: _content(value) for key, value in settings.items() if key.endswith("_token")}
    tokens = {key: value for key, value in named.items() if value is not None}
    if (folder / TEMPLATE_FILE).is_file():
        return ChatTemplate((folder / TEMPLATE_FILE).read_text(encoding="utf-8"), tokens, is_own=True)
    source = settings.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
    return ChatTemplate(source, tokens, is_own=True) if isinstance(source, str) else ChatTemplate(tokens=tokens)


def _settings(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # it only helps
    return found if isinstance(found, dict) else {}


def _content(token: Any) -> str | None:
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)  # Jinja's own would escape for HTML


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
