"""Rollouts: answers of a model to problems, in a mode and at a temperature, all of them kept."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fullband.decode import generate_texts
from fullband.evaluate.generative.problems import Problem
from fullband.evaluate.harness.text import HarnessText
from fullband.evaluate.journal import Journal
from fullband.feedback.passes import FeedbackModel
from fullband.feedback_config import FeedbackPasses


@dataclass(frozen=True)
class RolloutSetting:
    """How answers are made. Rollouts of a setting depend on the seed and on nothing else: neither on batches nor on other problems.

    n               rollouts of each problem
    new_tokens      tokens an answer may have
    """

    task: str
    prompts: str
    mode: str
    feedback_passes: FeedbackPasses | None
    temperature: float
    n: int
    new_tokens: int
    seed: int

    @property
    def name(self) -> str:
        passes = "" if self.feedback_passes is None else f"-{self.feedback_passes}"
        return f"{self.task}/{self.prompts}/{self.mode}{passes}/{self.temperature:g}"

    def key(self, problem: Problem | int) -> str:
        return f"{self.name}/{problem if isinstance(problem, int) else problem.number}"

    def made_of(self, ids: Sequence[int], stops: Sequence[str]) -> str:
        """Hash of what makes an answer of one model: the prompt's ids as they are given, strings that end it, and this setting."""
        return hashlib.sha256(repr((asdict(self), list(ids), list(stops))).encode()).hexdigest()[:24]


def room_for_prompts(model: FeedbackModel, setting: RolloutSetting) -> int:
    """Tokens that a prompt may have. Raises ValueError if the context has no room for an answer of `new_tokens`."""
    room = model.trunk.context - setting.new_tokens
    if room < 1:
        raise ValueError(
            f"{setting.task}: answers of {setting.new_tokens} tokens leave no room for a prompt in a context of {model.trunk.context}; "
            "ask for fewer, with --max-new-tokens"
        )
    return room


def roll_out(
    model: FeedbackModel,
    text: HarnessText,
    problems: Sequence[Problem],
    setting: RolloutSetting,
    journal: Journal,
    batch_rows: int = 8,
    done: Callable[[int], None] = lambda problems: None,
) -> None:
    """Put into `journal`, for each problem that it lacks,
    {"made_of": …, "question": …, "cut": …, "rollouts": [{"text", "tokens", "finish"}, …]}.

    made_of as `RolloutSetting.made_of`; an answer that another prompt, stop or setting made is made again

    text    without the string that ended it
    tokens  made, those of that string included
    cut     tokens that the beginning of the prompt lost, where prompt and answer would not fit the context together
    done    gets the number of problems answered: those that had been, then batch by batch

    Longest prompts first. Raises ValueError as `room_for_prompts`.
    """
    room = room_for_prompts(model, setting)
    ids = {problem.number: text.encode(problem.prompt) for problem in problems}
    made_of = {problem.number: setting.made_of(ids[problem.number][-room:], problem.stops) for problem in problems}
    waiting = [problem for problem in problems if (journal.get(setting.key(problem)) or {}).get("made_of") != made_of[problem.number]]
    done(len(problems) - len(waiting))
    waiting.sort(key=lambda problem: (-len(ids[problem.number]), problem.number))
    size = max(1, batch_rows // setting.n)
    for first in range(0, len(waiting), size):
        batch = waiting[first : first + size]
        completions = generate_texts(
            model,
            text.tokenizer,
            [ids[problem.number][-room:] for problem in batch],
            setting.mode,
            setting.feedback_passes,
            stop=batch[0].stops,
            keys=[problem.number for problem in batch],
            n=setting.n,
            temperature=setting.temperature,
            seed=setting.seed,
            max_new_tokens=setting.new_tokens,
        )
        records: dict[str, Any] = {}
        for place, problem in enumerate(batch):
            own = completions[place * setting.n :][: setting.n]
            records[setting.key(problem)] = {
                "made_of": made_of[problem.number],
                "question": problem.question,
                "cut": max(0, len(ids[problem.number]) - room),
                "rollouts": [{"text": one.text, "tokens": len(one.tokens), "finish": one.finish_reason} for one in own],
            }
        journal.add(records)
        done(len(batch))
