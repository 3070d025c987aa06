"""What a record of a jsonl file, a parquet table or a dataset is read as: one text, by a field or by a pattern of several."""

from __future__ import annotations

import string
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

USUAL = ("messages", "conversations", "conversation")
MESSAGE_KEYS = (("role", "content"), ("from", "value"))  # of a message; the second pair is ShareGPT's


class RecordReader(ABC):
    """How the text of a document is made of a record's fields.

    setting      the recipe's key to change if a field is missing
    fields       the fields that are read
    texts_only   whether each of them must hold text
    """

    setting: str
    fields: list[str]
    texts_only: bool

    @abstractmethod
    def text(self, record: Mapping[str, Any], where: str) -> str:
        """The document; empty for one to leave out. Raises ValueError that begins with `where`."""

    def text_of_row(self, row: Mapping[str, Any], where: str) -> str:
        """`text` for tables, where a null stands for a document that is not there."""
        return "" if any(row.get(field, "") is None for field in self.fields) else self.text(row, where)

    @abstractmethod
    def describe(self) -> str:
        """What is read, in words that differ when the documents do."""

    def value(self, record: Mapping[str, Any], field: str, where: str) -> Any:
        """Raises ValueError naming the fields that are there."""
        if field not in record:
            raise ValueError(f"{where}: no field '{field}'; the fields there are {listed(record)} ({self.hint(record)})")
        return record[field]

    def hint(self, record: Mapping[str, Any]) -> str:
        """What to set, for a record that does not hold what is read."""
        return f"set {self.setting}"

    def text_value(self, record: Mapping[str, Any], field: str, where: str) -> str:
        """Raises ValueError if the field is missing or holds no text."""
        value = self.value(record, field, where)
        if not isinstance(value, str):
            raise ValueError(f"{where}: the field '{field}' must be text, got {type(value).__name__} ({self.hint(record)})")
        return value.encode("utf-8", errors="replace").decode("utf-8")  # JSON can spell half a surrogate pair; no tokenizer takes it


class TextRecords(RecordReader):
    """The text of one field, or of a pattern such as "{question}\\n{answer}"."""

    setting = "data.source.text_field"
    texts_only = True

    def __init__(self, field: str):
        """Raises ValueError for a pattern with an unpaired brace."""
        try:
            parts = [(name, spec, conversion) for _, name, spec, conversion in string.Formatter().parse(field) if name is not None]
            if any(spec or conversion or not name for name, spec, conversion in parts):
                raise ValueError("braces must hold the name of a field alone")
        except ValueError as error:
            raise ValueError(f"{self.setting}: '{field}' is not a pattern of fields ({error})") from None
        named = [name for name, _, _ in parts]
        self.pattern = field if named else None
        self.fields = list(dict.fromkeys(named)) or [field]

    def text(self, record: Mapping[str, Any], where: str) -> str:
        values = {field: self.text_value(record, field, where) for field in self.fields}
        if self.pattern is None:
            return values[self.fields[0]]
        # Not `format`, to which a.b or a[b] in a field's name would be an attribute or an element of it.
        return "".join(text + ("" if field is None else values[field]) for text, field, _, _ in string.Formatter().parse(self.pattern))

    def hint(self, record: Mapping[str, Any]) -> str:
        if field := conversations_in(record):
            named = "" if field == "messages" else f" and data.source.messages_field={field}"
            return f"'{field}' holds conversations: set data.source.kind=chat{named}; or set {self.setting}"
        return super().hint(record)

    def describe(self) -> str:
        return f"field {self.pattern or self.fields[0]}"


def conversations_in(record: Mapping[str, Any]) -> str | None:
    """The field that holds a conversation, by what it holds, or by its usual names where only names are known (None for a value)."""
    for field, value in record.items():
        if (value is None and field in USUAL) or (isinstance(value, list) and value and _is_message(value[0])):
            return field
    return None


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and any(role in value and content in value for role, content in MESSAGE_KEYS)


def listed(names: Iterable[str]) -> str:
    """A few names, in words."""
    names = [name if len(name) <= 60 else f"{name[:59]}…" for name in names]
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "") if names else "none"
