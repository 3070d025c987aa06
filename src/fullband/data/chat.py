"""Conversations as training documents: one for each answer, the conversation up to it, with the loss on that answer alone.

An answer that is decoded in Soft follows a prompt that was run without feedback, and a later turn is a new prompt, earlier answers
included. So the conversation user-1, answer-1, user-2, answer-2 makes two documents:

    user-1 | answer-1                        plain | fused, scored
    user-1, answer-1, user-2 | answer-2      plain | fused, scored

A prompt is what the chat template gives with its generation prompt, tokenised as at decoding; the answer is what the template puts after
it, tokenised as it stands there, up to the id that ends a turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fullband.config import ChatSource, FilesSource, HuggingFaceSource
from fullband.data.batch import IGNORE, PADDING, Batch, Document
from fullband.data.chat_template import ChatTemplate, Message, load_chat_template
from fullband.data.files import Files
from fullband.data.huggingface import HuggingFace
from fullband.data.records import MESSAGE_KEYS, RecordReader, conversations_in
from fullband.data.sources import TextSource
from fullband.data.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant")
SHAREGPT = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}  # its names of roles


class ChatRecords(RecordReader):
    """A conversation as a JSON list of messages, of a field of messages or of a prompt and its completion.

    One without a message of the assistant is left out, unless `keep_all`.
    """

    texts_only = False

    def __init__(self, config: ChatSource, keep_all: bool = False):
        self.setting = "data.source.prompt_field and completion_field" if config.prompt_field else "data.source.messages_field"
        self.fields = [field for field in (config.prompt_field, config.completion_field) if field] or [config.messages_field]
        self._system, self._keep_all = config.system, keep_all

    def text(self, record: Mapping[str, Any], where: str) -> str:
        if len(self.fields) == 2:
            contents = [self.text_value(record, field, where) for field in self.fields]
            messages = [Message(role=role, content=content) for role, content in zip(("user", "assistant"), contents, strict=True)]
        else:
            messages = self._messages(self.value(record, self.fields[0], where), f"{where}: {self.fields[0]}")
        if self._system is not None and (not messages or messages[0]["role"] != "system"):
            messages = [Message(role="system", content=self._system), *messages]
        kept = self._keep_all or any(m["role"] == "assistant" for m in messages)
        return json.dumps(messages, ensure_ascii=False) if kept else ""

    def _messages(self, value: Any, where: str) -> list[Message]:
        if not isinstance(value, list):
            raise ValueError(f"{where} must be a list of messages, got {type(value).__name__} (set {self.setting})")
        messages = []
        for number, message in enumerate(value):
            keys = MESSAGE_KEYS if isinstance(message, Mapping) else ()
            role_key, content_key = next(((role, content) for role, content in keys if role in message and content in message), ("", ""))
            if not role_key:
                raise ValueError(f"{where}, message {number}: not an object with role and content (or from and value)")
            role = SHAREGPT.get(str(message[role_key]), message[role_key])
            if role not in ROLES:
                raise ValueError(f"{where}, message {number}: role must be one of {', '.join(ROLES)}, got '{role}'")
            messages.append(Message(role=role, content=self.text_value(message, content_key, f"{where}, message {number}")))
        return messages

    def hint(self, record: Mapping[str, Any]) -> str:
        found = conversations_in(record)
        return f"set data.source.messages_field={found}" if found else super().hint(record)

    def describe(self) -> str:
        system = "" if self._system is None else f", system {json.dumps(self._system, ensure_ascii=False)}"
        return f"chat fields {', '.join(self.fields)}{system}"


def chat_source(config: ChatSource, keep_all: bool = False) -> TextSource:
    """Conversations, each a document that `ChatEncoder` reads. ValueError for missing files, packages or data sets."""
    reader = ChatRecords(config, keep_all)
    if config.dataset is not None:
        same = ("dataset", "name", "split", "validation_split", "validation_documents")
        return HuggingFace(HuggingFaceSource.model_validate({key: getattr(config, key) for key in same}), reader)
    held_out = {"validation_paths": config.validation_paths, "validation_fraction": config.validation_fraction}
    return Files(FilesSource.model_validate({"paths": config.paths} | held_out), reader)


def chat_template(config: ChatSource, tokenizer_folder: Path | None) -> ChatTemplate:
    """The recipe's template, else the tokenizer's own, else ChatML. Raises ValueError for a template file that is not there."""
    own = load_chat_template(tokenizer_folder) if tokenizer_folder else ChatTemplate()
    if config.template is None:
        return own
    try:
        return ChatTemplate(Path(config.template).read_text(encoding="utf-8"), own.tokens, is_own=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"data.source.template: {config.template}: cannot be read ({error})") from None


@dataclass(frozen=True)
class Answer:
    """A conversation up to one of its answers, which begins after the first `prompt` of its `tokens` [N]."""

    tokens: np.ndarray
    prompt: int

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def targets(self) -> np.ndarray:
        """Next tokens where they belong to the answer: from the prompt's last position on."""
        targets = np.append(self.tokens[1:], IGNORE)
        targets[: self.prompt - 1] = IGNORE
        return targets

    @property
    def plain(self) -> np.ndarray:
        return np.arange(len(self.tokens)) < self.prompt

    def document(self) -> Document:
        return Document(torch.from_numpy(self.tokens), torch.from_numpy(self.targets), torch.from_numpy(self.plain))


class ChatEncoder:
    """Conversations to answers. One that does not fit `length` tokens is left out: cut off, it would teach to end nowhere."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, length: int):
        self.tokenizer, self.template, self.length = tokenizer, template, length
        stop = tokenizer.follow("\n", template.stop) if template.stop else []
        self._stop = stop if len(stop) > 1 else []  # a tokenizer that spells the end of a turn out
        self._stops = set(tokenizer.stops) | ({stop[0]} if len(stop) == 1 else set())

    def encode_documents(self, texts: Sequence[str]) -> list[list[Answer]]:
        """Of conversations as `ChatRecords` writes them."""
        return [self.answers(json.loads(text)) for text in texts]

    def answers(self, messages: Sequence[Message]) -> list[Answer]:
        """Those of all the assistant's turns that fit a row. Raises ValueError as `all_answers`."""
        return [answer for answer in self.all_answers(messages) if self.fits(answer)]

    def fits(self, answer: Answer) -> bool:
        return len(answer) <= self.length

    def all_answers(self, messages: Sequence[Message]) -> list[Answer]:
        """Those of any length. Raises ValueError if the template refuses the conversation or rewrites a prompt."""
        found = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or number == 0:
                continue
            prompt = self.template.render(messages[:number])
            whole = self.template.render(messages[: number + 1], add_generation_prompt=False)
            if not whole.startswith(prompt):
                raise ValueError(
                    "the chat template does not put an answer after its own generation prompt; name another (data.source.template)"
                )
            prompt_ids = self.tokenizer.begin(prompt)
            answer_ids = self._ended(self.tokenizer.follow(prompt, whole[len(prompt) :]))
            if prompt_ids:
                found.append(Answer(np.array([*prompt_ids, *answer_ids], dtype=np.int64), len(prompt_ids)))
        return found

    def _ended(self, ids: list[int]) -> list[int]:
        """Up to the first id, or spelled-out word, that ends the turn; with the end of document after it where nothing does."""
        for place, token in enumerate(ids):
            if token in self._stops:
                return ids[: place + 1]
            if self._stop and ids[place : place + len(self._stop)] == self._stop:
                return ids[: place + len(self._stop)]
        end = self.tokenizer.end_of_document
        return ids if end is None else [*ids, end]


def pack_answers(rows: Sequence[Sequence[Answer]], length: int) -> Batch:
    """Rows [B, length] that hold whole answers one after another, padded on the right."""
    shape = (len(rows), length)
    tokens, targets = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORE, dtype=np.int64)
    positions, documents = np.zeros(shape, dtype=np.int64), np.full(shape, PADDING, dtype=np.int64)
    plain = np.ones(shape, dtype=bool)
    for row, answers in enumerate(rows):
        start = 0
        for number, answer in enumerate(answers):
            here = slice(start, start + len(answer))
            tokens[row, here], targets[row, here], plain[row, here] = answer.tokens, answer.targets, answer.plain
            positions[row, here], documents[row, here] = np.arange(len(answer)), number
            start = here.stop
    return Batch(*(torch.from_numpy(values) for values in (tokens, targets, positions, documents, plain)))
