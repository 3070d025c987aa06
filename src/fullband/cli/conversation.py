"""A conversation with a model: its turns, how they are answered, and the last one answered again in another mode."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from fullband.cli.completions import limited, settings_json
from fullband.data.chat_template import ChatTemplate, Message
from fullband.decode.modes import Mode
from fullband.decode.options import GenerateOptions
from fullband.decode.texts import TextCompletion, TextStream

if TYPE_CHECKING:
    from fullband.data.tokenizer import Tokenizer
    from fullband.loading import LoadedModel


@dataclass(frozen=True)
class Turn:
    """What the user said and what the model answered, how, and what it took. `finish_reason` is stop, length, or cancelled by the user."""

    user: str
    text: str
    mode: str
    feedback_passes: int | str
    seed: int
    prompt_tokens: int
    new_tokens: int
    finish_reason: str
    seconds: float

    def to_json(self, number: int) -> dict[str, Any]:
        return {"turn": number} | asdict(self)


class Conversation:
    """Turns so far, and the settings of the next one: `options` (their mode among them) and `system`. Both may be changed at any time.

    A turn is a new prompt (law 6): the whole conversation, answers included, is prefilled again by the rule of the mode. The draws of a
    turn depend on the seed and its number, so answering it again in another mode uses the same ones.
    """

    def __init__(
        self,
        model: LoadedModel,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        options: GenerateOptions,
        dtype: str,
        system: str | None = None,
    ):
        self.model, self.tokenizer, self.template, self.dtype, self.system = model, tokenizer, template, dtype, system
        stop = template.stop
        ends_by_id = stop is not None and len(ids := tokenizer.follow("\n", stop)) == 1 and ids[0] in tokenizer.stops
        self.options = options if stop is None or ends_by_id else replace(options, stop=(*options.stop_strings, stop))
        self.turns: list[Turn] = []

    def say(self, user: str, on_text: Callable[[str], None]) -> Turn:
        """The next turn. Ctrl-C cancels the answer and keeps what there is of it. Raises ValueError, and adds no turn, for a conversation
        that the template refuses or that has outgrown the context."""
        turn = self._answer(self.turns, user, self.options, on_text)
        self.turns.append(turn)
        return turn

    def replay(self, mode: Mode, on_text: Callable[[str], None]) -> Turn:
        """The last turn again, in another mode: the new answer takes the place of the old one. Raises ValueError if there is none."""
        if not self.turns:
            raise ValueError("there is no turn to replay yet")
        *before, last = self.turns
        turn = self._answer(before, last.user, self.options.in_mode(mode), on_text)
        self.turns[-1] = turn
        return turn

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self.turns.clear()

    def messages(self, turns: list[Turn]) -> list[Message]:
        said: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        for turn in turns:
            said += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.text}]
        return said

    def to_json(self) -> dict[str, Any]:
        return {
            "system": self.system,
            "settings": settings_json(self.options, self.dtype),
            "turns": [turn.to_json(number) for number, turn in enumerate(self.turns, start=1)],
        }

    def _answer(self, before: list[Turn], user: str, options: GenerateOptions, on_text: Callable[[str], None]) -> Turn:
        from fullband.cli.console import messages
        from fullband.cli.progress import forward_progress
        from fullband.feedback.by_passes import positions_to_run

        begun, mode = time.perf_counter(), options.resolved_mode
        prompt = self.template.render([*self.messages(before), {"role": "user", "content": user}])
        tokens = self.tokenizer.begin(prompt)
        options = replace(limited(options, self.model.trunk.context), keys=[len(before)])
        stream = None
        try:
            positions = positions_to_run(len(tokens), [mode.feedback_passes])
            with forward_progress(messages(), self.model, positions, "prefilling the conversation"):
                stream = TextStream(self.model, self.tokenizer, [tokens], options)
            (answer,) = stream.completions(lambda new: on_text(new.texts.get(0, "")))
        except KeyboardInterrupt:
            answer = TextCompletion("", [], "cancelled") if stream is None else stream.completion(0)
        made, seconds = len(answer.tokens), time.perf_counter() - begun
        return Turn(user, answer.text, mode.name, mode.feedback_passes, options.seed, len(tokens), made, answer.finish_reason, seconds)
