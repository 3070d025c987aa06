"""Stop strings, found in text that arrives in pieces. What is given out can no longer be a part of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Text up to the first stop string, whatever the pieces in which it arrives.

    The stop string that is complete first ends the text; of two that end with the same character, the longer one.
    """

    def __init__(self, strings: Sequence[str]):
        self._strings = strings
        self._longest = max(map(len, strings), default=0)
        self._held = ""  # may be the beginning of a stop string
        self.stopped = False

    def push(self, piece: str) -> str:
        """The text that can be given out now. Nothing comes after a stop string."""
        if self.stopped:
            return ""
        text = self._held + piece
        found = [(start + len(string), start) for string in self._strings if (start := text.find(string)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        whole = len(text) - self._beginning(text)
        self._held = text[whole:]
        return text[:whole]

    def finish(self) -> str:
        """The text that was held back: it was no stop string."""
        rest, self._held = self._held, ""
        return rest

    def _beginning(self, text: str) -> int:
        """Characters at the end of the text with which a stop string begins."""
        for size in range(min(len(text), self._longest - 1), 0, -1):
            if any(string.startswith(text[-size:]) for string in self._strings):
                return size
        return 0
