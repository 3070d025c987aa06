"""Tasks: official prompts whatever the data; examples that are never the question; limits and shards."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fullband.evaluate.harness.choice import chance_of, check_metrics, requests_of, score_benchmark
from fullband.evaluate.harness.model import FullBandLM
from fullband.evaluate.harness.tasks import PAPER_TASKS, SUITES, Benchmark, code_unrun, expand, load_benchmarks
from fullband.evaluate.report.scores import mean_of_tasks, summarize_task


def prompts(benchmark: Benchmark, limit: int | None = None, shard: tuple[int, int] = (0, 1)) -> dict[int, str]:
    [instances] = requests_of(benchmark, limit, shard).values()
    return {instance.doc_id: instance.args[0] for instance in instances}


def test_every_task_of_the_suites_is_found() -> None:
    for suite in SUITES.values():
        assert all(expand(suite.tasks).values())
    assert len(PAPER_TASKS) == 10 and len(expand(["mmlu"])["mmlu"]) == 57


@pytest.mark.shared_data
@pytest.mark.parametrize(("task", "shown"), [("truthfulqa_mc2", "question"), ("boolq", "passage"), ("piqa", "goal")])
def test_examples_from_the_questions_themselves_are_never_the_question(task: str, shown: str, shared_data: Path) -> None:
    [benchmark] = load_benchmarks([task], 5, shared_data)
    asked = benchmark.parts[0].eval_docs
    for number, prompt in prompts(benchmark, 40).items():
        assert prompt.count(asked[number][shown]) == 1, number


@pytest.mark.shared_data
def test_truthfulqa_takes_as_many_examples_as_are_asked(shared_data: Path) -> None:
    few, none = (prompts(load_benchmarks(["truthfulqa_mc2"], shots, shared_data)[0], 2)[1] for shots in (5, 0))
    assert (few.count("Q: What is human life expectancy"), none.count("Q: What is human life expectancy")) == (6, 1)
    assert few.endswith(none)


@pytest.mark.shared_data
def test_prompts_are_those_of_the_official_definition(shared_data: Path, tmp_path: Path) -> None:
    """As lm-eval makes them by itself: its own index, its own order, its own seed."""
    import yaml
    from lm_eval.tasks import TaskManager

    [path] = expand(["openbookqa"])["openbookqa"].values()
    overlay = {"include": str(path), "task": "openbookqa", "dataset_path": str(shared_data / "openbookqa"), "num_fewshot": 5}
    (tmp_path / "openbookqa.yaml").write_text(yaml.safe_dump(overlay))
    official = TaskManager(include_path=str(tmp_path), include_defaults=False).load(["openbookqa"])["tasks"]["openbookqa"]
    official.set_fewshot_seed(1234)
    official.build_all_requests(limit=6)
    [benchmark] = load_benchmarks(["openbookqa"], 5, shared_data)
    for _ in range(2):  # asking again draws no other examples
        assert prompts(benchmark, 6) == {instance.doc_id: instance.args[0] for instance in official.instances}


@pytest.mark.slow
@pytest.mark.shared_data
def test_a_limit_is_spread_over_a_group_and_shards_part_it(shared_data: Path) -> None:
    [benchmark] = load_benchmarks(["mmlu"], 5, shared_data)
    taken = benchmark.documents(60)
    assert sum(taken.values()) == 60 and set(taken.values()) == {1, 2}
    whole = {task: len(instances) for task, instances in requests_of(benchmark, 60).items()}
    parts = [requests_of(benchmark, 60, (index, 2)) for index in range(2)]
    assert sum(len(instances) for part in parts for instances in part.values()) == sum(whole.values()) == 240


def test_folders_of_one_name_are_not_mistaken(tmp_path: Path) -> None:
    for place, word in (("one", "first"), ("other", "second"), ("one", "third")):
        folder = tmp_path / place / "arc_easy"
        folder.mkdir(parents=True, exist_ok=True)
        row = {"id": "1", "question": word, "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "A"}
        (folder / "test.jsonl").write_text(json.dumps(row) + "\n")
        readme = "---\nconfigs:\n- config_name: ARC-Easy\n  data_files:\n  - split: test\n    path: test.jsonl\n---\n"
        (folder / "README.md").write_text(readme)
        [benchmark] = load_benchmarks(["arc_easy"], 0, tmp_path / place)
        assert prompts(benchmark) == {0: f"Question: {word}\nAnswer:"}


@pytest.mark.shared_data
def test_more_examples_than_there_are(shared_data: Path) -> None:
    [benchmark] = load_benchmarks(["mbpp"], 9, shared_data)
    with pytest.raises(ValueError, match=r"mbpp: .*exceeds the 3"):
        requests_of(benchmark, 1)


@pytest.mark.shared_data
def test_tasks_that_run_code_are_refused(shared_data: Path) -> None:
    [benchmark] = load_benchmarks(["humaneval"], None, shared_data)
    with pytest.raises(ValueError, match="it runs a model's code"):
        check_metrics(benchmark)
    with code_unrun():
        import evaluate

        with pytest.raises(RuntimeError, match=r"run by fullband\.evaluate\.sandbox"):
            evaluate.load("code_eval").compute(references=["x"], predictions=[["y"]], k=[1])


@pytest.mark.shared_data
def test_readings_and_batches(tiny: Any, shared_data: Path) -> None:
    """Batches of 1 and 8 agree, a reading asked alone equals the one of a sweep, and nothing is computed twice."""
    [benchmark] = load_benchmarks(["copa"], 2, shared_data)
    whole = FullBandLM(tiny.converted, batch_size=8)
    swept = score_benchmark(whole, benchmark, [0, 1, 2], 8)
    assert all(list(one.scores) == ["0", "1", "2"] for one in swept)
    alone = FullBandLM(tiny.converted, mode="fused", feedback_passes="2", batch_size=1)
    score_benchmark(alone, benchmark, [2], 8)
    assert len(alone.journal) == len(whole.journal) == 16
    for key, scores in alone.journal.items():
        assert scores["2"][0] == pytest.approx(whole.journal[key]["2"][0], abs=1e-3)
    before = len(whole.journal)
    whole.model = None  # type: ignore[assignment]
    assert score_benchmark(whole, benchmark, [0, 1, 2], 8) == swept and len(whole.journal) == before


def document(number: int, **scores: float) -> dict[str, Any]:
    return {"task": "t", "document": number, "prompt_hash": "p", "scores": {name: {"acc": value} for name, value in scores.items()}}


def test_summaries_by_hand() -> None:
    documents = [document(i, **{"0": a, "1": b}) for i, (a, b) in enumerate([(0, 1), (1, 1), (0, 1), (1, 0)])]
    found = summarize_task(documents, "acc", [document(i, **{"0": value}) for i, value in enumerate([0, 0, 0, 1])])
    assert (found["readings"]["0"]["value"], found["readings"]["1"]["value"], found["baseline"]["value"]) == (0.5, 0.75, 0.25)
    assert found["readings"]["0"]["error"] == pytest.approx((1 / 3) ** 0.5 / 2)
    to_plain, to_baseline = found["differences"]
    assert to_plain["mcnemar"] == {"only_first": 1, "only_second": 2, "p_value": 1.0}
    assert (to_baseline["first"], to_baseline["difference"]["value"]) == ("baseline", 0.25)
    mean = mean_of_tasks([found, found])
    assert mean["readings"]["1"]["value"] == 0.75
    assert mean["readings"]["1"]["error"] == pytest.approx(found["readings"]["1"]["error"] / 2**0.5)
    assert mean["differences"][0]["difference"]["value"] == 0.25
    with pytest.raises(ValueError, match="the baseline was asked other documents"):
        summarize_task(documents, "acc", [document(i, **{"0": 1.0}) for i in (0, 1, 2, 4)])


class Choices:
    """A task of lm-eval's kind: accuracy, and how much of the likelihood the right choices have."""

    OUTPUT_TYPE = "multiple_choice"

    def doc_to_choice(self, doc: dict[str, Any]) -> list[str]:
        return list(doc["choices"])

    def aggregation(self) -> dict[str, Any]:
        def mean(values: list[float]) -> float:
            return sum(values) / len(values)

        return {"acc": mean, "mass": mean, "perplexity": math.exp}

    def process_results(self, doc: dict[str, Any], answers: list[tuple[float, bool]]) -> dict[str, float]:
        likely = [math.exp(value) for value, _ in answers]
        best = max(range(len(answers)), key=lambda choice: answers[choice][0] / len(doc["choices"][choice]))
        right = doc["right"]
        return {"acc": float(best in right[:1]), "mass": sum(likely[i] for i in right) / sum(likely), "perplexity": 1.0}


@pytest.mark.parametrize(
    ("choices", "right", "acc", "mass"), [(["a", "bb"], [1], 0.5, 0.5), (["a", "b", "ccc", "d", "e"], [2, 0], 0.2, 0.4)]
)
def test_chance_is_what_a_guess_among_the_choices_scores(choices: list[str], right: list[int], acc: float, mass: float) -> None:
    own = [SimpleNamespace(doc={"choices": choices, "right": right}) for _ in choices]
    assert chance_of(Choices(), own) == pytest.approx({"acc": acc, "mass": mass})
    assert chance_of(Choices(), own[1:]) is None, "requests that are not one for each choice"
    generating = Choices()
    generating.OUTPUT_TYPE = "generate_until"
    assert chance_of(generating, own[:1]) is None


def test_the_chance_of_mixed_numbers_of_choices_is_the_mean() -> None:
    """None where a document or a task does not know it."""
    known = [document(0, **{"0": 1.0}) | {"chance": {"acc": 0.25}}, document(1, **{"0": 0.0}) | {"chance": {"acc": 0.5}}]
    found, unknown = summarize_task(known, "acc"), summarize_task([known[0], document(1, **{"0": 0.0})], "acc")
    assert found["chance"] == 0.375 and unknown["chance"] is None
    half = found | {"chance": 0.5}
    assert mean_of_tasks([found, half])["chance"] == 0.4375 and mean_of_tasks([found, unknown])["chance"] is None
