"""The shapes of a journal's records: a line that is JSON and none of these is damage, named by its file and line."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

Scores = dict[str, tuple[float, bool]]
"""By way of reading: the log-likelihood of a continuation, and whether it is the greedy one."""


class Document(TypedDict):
    task: str
    document: int
    prompt_hash: str
    scores: dict[str, dict[str, float]]
    chance: NotRequired[dict[str, float]]  # older ones, and those without choices, lack it


class Rollout(TypedDict):
    text: str
    tokens: int
    finish: str


class Rollouts(TypedDict):
    question: NotRequired[str]  # older ones lack it
    cut: int
    rollouts: list[Rollout]


class Grades(TypedDict):
    verdicts: list[str]
    details: list[Any]


class AboutTask(TypedDict):
    kind: Literal["task"]
    metric: str
    shots: int | None
    data_hash: str
    prompt_hash: list[str]
    seconds: float


class AboutProblems(TypedDict):
    kind: Literal["generative"]
    problems: list[int]
    data_hash: str
    prompt_hash: list[str]
    seconds: float


SHAPES: dict[str, Any] = {
    "scores": Scores,
    "documents": Document,
    "rollouts": Rollouts,
    "grades": Grades,
    "tasks": Annotated[AboutTask | AboutProblems, Field(discriminator="kind")],
}
