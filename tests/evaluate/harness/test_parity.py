"""Standard mode is lm-eval's own Hugging Face model: in every log-likelihood, and in every greedy answer.

In float64: a random model's answers are so unlikely (4,000 nats) that float32 could not tell 1e-4 apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fullband.evaluate.harness.choice import requests_of
from fullband.evaluate.harness.model import FullBandLM
from fullband.evaluate.harness.tasks import PAPER_TASKS, load_benchmarks

pytestmark = pytest.mark.shared_data


@pytest.fixture(scope="module")
def theirs(tiny: Any) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(tiny.source), dtype="float64", batch_size=2, device="cpu")


@pytest.fixture(scope="module")
def asked(theirs: Any, shared_data: Path) -> Asked:
    """The requests of two documents of a task behind five examples, with lm-eval's own answers; made once for both of our models."""

    @functools.cache
    def ask(name: str) -> list[tuple[list[Any], list[Any]]]:
        [benchmark] = load_benchmarks([name], 5, shared_data)
        return [(own, theirs.loglikelihood(own, disable_tqdm=True)) for own in requests_of(benchmark, 2).values()]

    return ask


@pytest.fixture(scope="module", params=["source", "converted"])
def ours(tiny: Any, request: pytest.FixtureRequest) -> FullBandLM:
    return FullBandLM(getattr(tiny, request.param), dtype="float64", batch_size=2)


Asked = Callable[[str], list[tuple[list[Any], list[Any]]]]
LONG = ("rte", "truthfulqa_mc2", "boolq", "mmlu")  # prompts of thousands of bytes, or of 57 tasks: seconds each


SLOW = (pytest.mark.slow(minutes=1), pytest.mark.xdist_group("parity"))  # in one process: lm-eval's answers are for both of our models


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW if name in LONG else ()) for name in PAPER_TASKS])
def test_log_likelihoods_of_the_ten_tasks(name: str, ours: FullBandLM, asked: Asked) -> None:
    compared = 0
    for instances, other in asked(name):
        one = ours.loglikelihood(instances, disable_tqdm=True)
        assert [value for value, _ in one] == pytest.approx([value for value, _ in other], abs=1e-5, rel=0)
        assert [greedy for _, greedy in one] == [greedy for _, greedy in other]
        compared += len(instances)
    assert compared >= 4


def test_greedy_answers(ours: FullBandLM, theirs: Any, shared_data: Path) -> None:
    [benchmark] = load_benchmarks(["gsm8k"], None, shared_data)
    [instances] = requests_of(benchmark, 3).values()
    for instance in instances:
        instance.arguments[1]["max_gen_toks"] = 10
    one, other = (model.generate_until(instances, disable_tqdm=True) for model in (ours, theirs))
    assert one == other
    assert any(one)


def test_rolling_log_likelihoods(ours: FullBandLM, theirs: Any) -> None:
    from lm_eval.api.instance import Instance

    texts = ["", "one text", "another, longer than that"][1:]
    requests = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in texts]
    assert ours.loglikelihood_rolling(requests) == pytest.approx(theirs.loglikelihood_rolling(requests, disable_tqdm=True), abs=1e-4)


def test_an_empty_context(ours: FullBandLM, theirs: Any) -> None:
    from lm_eval.api.instance import Instance

    requests = [Instance("loglikelihood", {}, ("", " yes"), 0)]
    [(one, _)], [(other, _)] = ours.loglikelihood(requests, disable_tqdm=True), theirs.loglikelihood(requests, disable_tqdm=True)
    assert one == pytest.approx(other, abs=1e-4)
