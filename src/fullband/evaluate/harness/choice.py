"""Scores of a model on lm-eval's tasks, document by document, for each number of feedback passes (Fig. 4 right, Table 2)."""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fullband.evaluate.harness.model import FullBandLM
from fullband.evaluate.harness.states import Scoring
from fullband.evaluate.harness.tasks import FEW_SHOT_SEED, Benchmark, first_line

PREFERRED = ("acc_norm", "acc", "exact_match")  # the metric a table shows: length-normalised accuracy where the task has it

UNLIKELY = -1e6  # nats: a choice that is out of the question, by character or by token too


@dataclass(frozen=True)
class DocumentScore:
    """How one document was scored: its metrics by name, by feedback passes ("0", "1", …, "exact", "soft").

    task, document  the lm-eval task and the number of the document in it
    prompt_hash     of all texts the model was given
    chance          its metrics for a guess among its choices; None where it has none to choose from
    """

    task: str
    document: int
    prompt_hash: str
    scores: dict[str, dict[str, float]]
    chance: dict[str, float] | None = None

    def to_json(self) -> dict[str, Any]:
        known = {} if self.chance is None else {"chance": self.chance}
        return {"task": self.task, "document": self.document, "prompt_hash": self.prompt_hash, "scores": self.scores} | known


def requests_of(benchmark: Benchmark, limit: int | None = None, shard: tuple[int, int] = (0, 1), lm: Any = None) -> dict[str, list[Any]]:
    """lm-eval's requests, by task. `lm` (anything with apply_chat_template) = as a conversation.

    Examples are drawn document after document, so all prompts are made in lm-eval's order, and a shard takes every n-th of them.
    """
    index, count = shard
    found = {}
    for part in benchmark.parts:
        documents = benchmark.documents(limit)[part.config.task]
        if not documents:
            continue
        part.set_fewshot_seed(FEW_SHOT_SEED)  # again: a task draws on from where it stopped
        if part.config.num_fewshot is None:
            part.set_config("num_fewshot", 0)
        _build(part, documents, lm)
        part._instances = [instance for instance in part.instances if instance.doc_id % count == index]
        if part.instances:
            found[part.config.task] = part.instances
    return found


def _build(part: Any, documents: int, lm: Any) -> None:
    chat = {"apply_chat_template": True, "chat_template": lm.apply_chat_template, "fewshot_as_multiturn": True} if lm else {}
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # its bar
            part.build_all_requests(limit=documents, **chat)
    except (AssertionError, ValueError) as error:  # more examples than there are
        shots = part.config.num_fewshot
        raise ValueError(f"{part.config.task}: {shots} examples for a prompt cannot be drawn from its data ({first_line(error)})") from None


def check_metrics(benchmark: Benchmark) -> str:
    """The metric that tables show. Raises ValueError for a task whose metrics are no means over documents, or that runs code."""
    if any(getattr(part, "UNSAFE_CODE", False) for part in benchmark.parts):
        raise ValueError(f"{benchmark.name}: it runs a model's code; humaneval and mbpp do so in a sandbox, other tasks can't")
    names = [_means(part) for part in benchmark.parts]
    shared = [metric for metric in names[0] if all(metric in other for other in names)]
    if not shared:
        raise ValueError(f"{benchmark.name}: its metrics are no means over documents; run it with `fullband lm-eval`")
    return next((metric for metric in PREFERRED if metric in shared), shared[0])


def _means(part: Any) -> list[str]:
    return [metric for metric, how in part.aggregation().items() if getattr(how, "__name__", "") == "mean"]


def score_benchmark(
    lm: FullBandLM, benchmark: Benchmark, scorings: Sequence[Scoring], limit: int | None = None, shard: tuple[int, int] = (0, 1)
) -> list[DocumentScore]:
    """One entry for each document, with all its metrics that are means.

    A task that generates text is scored once, in the mode of `lm`. Raises ValueError as `score_continuations` and `generate_until` do.
    """
    found: dict[tuple[str, int], DocumentScore] = {}
    for task, instances in requests_of(benchmark, limit, shard).items():
        part = next(part for part in benchmark.parts if part.config.task == task)
        generates = instances[0].request_type == "generate_until"
        lm.scorings = () if generates else scorings
        for scoring in [lm.scoring] if generates else scorings:
            lm.scoring = scoring
            try:
                responses = getattr(lm, instances[0].request_type)(instances, disable_tqdm=True)
            except ValueError as error:
                raise ValueError(f"{task}: {error}") from None
            for instance, response in zip(instances, responses, strict=True):
                instance.resps = [response]
                instance.filtered_resps = {}
            part.apply_filters()
            for document, own in _by_document(instances).items():
                entry = found.setdefault((task, document), DocumentScore(task, document, _prompt_hash(own), {}, chance_of(part, own)))
                entry.scores[lm.mode.name if generates else str(scoring)] = _metrics(part, own)
    return list(found.values())


def _by_document(instances: list[Any]) -> dict[int, list[Any]]:
    documents: dict[int, list[Any]] = {}
    for instance in instances:
        documents.setdefault(instance.doc_id, []).append(instance)
    return {document: sorted(own, key=lambda instance: instance.idx) for document, own in documents.items()}


def _metrics(part: Any, own: list[Any]) -> dict[str, float]:
    """Metrics of one document; where filters differ, the first filter's stand under the bare name."""
    found: dict[str, float] = {}
    for filter_name in own[0].filtered_resps:
        for metric, value in part.process_results(own[0].doc, [instance.filtered_resps[filter_name] for instance in own]).items():
            if metric in _means(part):
                found.setdefault(metric, float(value))
                if len(own[0].filtered_resps) > 1:
                    found[f"{metric},{filter_name}"] = float(value)
    return found


def chance_of(part: Any, own: list[Any]) -> dict[str, float] | None:
    """The metrics of a document for a guess: their mean over which of its choices the model likes best, all others being out of the
    question. One over the choices where one of them is right; the share of right ones where the metric is the likelihood of these."""
    if part.OUTPUT_TYPE != "multiple_choice" or len(part.doc_to_choice(own[0].doc)) != len(own):
        return None  # some metrics ask for the choices' likelihoods without the question, too
    likes = [[(0.0 if choice == best else UNLIKELY, choice == best) for choice in range(len(own))] for best in range(len(own))]
    guesses = [part.process_results(own[0].doc, answers) for answers in likes]
    return {metric: sum(float(found[metric]) for found in guesses) / len(guesses) for metric in guesses[0] if metric in _means(part)}


def _prompt_hash(own: list[Any]) -> str:
    return hashlib.sha256(repr([instance.args for instance in own]).encode()).hexdigest()[:16]
