"""From problems to Pass@k with a model whose answers are scripted: every step is real but the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fullband.data.chat_template import ChatTemplate
from fullband.data.tokenizers import ByteTokenizer
from fullband.decode import TextCompletion
from fullband.evaluate.generative import rollouts as rollouts_module
from fullband.evaluate.generative.grades import grade
from fullband.evaluate.generative.problems import TASKS, ProblemSet, load_problems
from fullband.evaluate.generative.rollouts import RolloutSetting, roll_out
from fullband.evaluate.harness.text import HarnessText
from fullband.evaluate.journal import Journal
from fullband.evaluate.report.scores import summarize
from fullband.evaluate.sandbox import Sandbox
from fullband.model import FullBandModel

RIGHT, WRONG = "    return a + b\n", "    return a - b\n"
TEXT = HarnessText(ByteTokenizer())


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three problems like HumanEval's, three like GSM8K's."""
    prompt = 'def add(a, b):\n    """Add {}."""\n'
    test = "def check(candidate):\n    assert candidate(2, 3) == 5\n"
    code = [
        {"task_id": f"T/{i}", "prompt": prompt.format(i), "test": test, "entry_point": "add", "canonical_solution": RIGHT} for i in range(3)
    ]
    sums = [{"question": f"What is {i} + 1?", "answer": f"{i} + 1 = {i + 1}\n#### {i + 1}"} for i in range(3)]
    for name, rows, split in (("humaneval", code, "test"), ("gsm8k", sums, "test"), ("gsm8k", sums * 3, "train")):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test"))
    (tmp_path / "gsm8k" / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n", encoding="utf-8")
    return tmp_path


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Answers by prompt, mode, temperature and sample instead of a model's; returns what was asked of it."""

    def play(answer: Callable[[str, str, float, int], str]) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def scripted(
            model: Any, tokenizer: Any, prompts: Sequence[list[int]], mode: str, passes: Any, **asked: Any
        ) -> list[TextCompletion]:
            calls.append({"prompts": [tokenizer.decode(ids) for ids in prompts], "mode": mode, "passes": passes, **asked})
            texts = [answer(text, mode, asked["temperature"], sample) for text in calls[-1]["prompts"] for sample in range(asked["n"])]
            return [TextCompletion(text, list(text.encode()), "length" if text.endswith("…") else "stop") for text in texts]

        monkeypatch.setattr(rollouts_module, "generate_texts", scripted)
        return calls

    return play


def setting(mode: str, temperature: float, n: int, task: str = "humaneval") -> RolloutSetting:
    return RolloutSetting(task, "base", mode, 1 if mode == "fused" else None, temperature, n, 16, 5)


def test_code(data: Path, script: Any, sandbox: Sandbox, isometric_model: Callable[..., FullBandModel], tmp_path: Path) -> None:
    """Right in Soft: 3, 1 and 0 of 4 rollouts; in Standard the first problem alone, and only at 0.7."""

    def answer(prompt: str, mode: str, temperature: float, sample: int) -> str:
        number = int(prompt.split("Add ")[-1][0])
        right = sample < (3, 1, 0)[number] if mode == "soft" else number == 0 and temperature == 0.7
        return RIGHT if right else WRONG

    calls = script(answer)
    model = isometric_model(context=512)
    found = load_problems(TASKS["humaneval"], "base", ChatTemplate(), data, None)
    assert [problem.prompt for problem in found.problems] == [f'def add(a, b):\n    """Add {i}."""\n' for i in range(3)]
    settings = [setting(mode, temperature, 4) for mode in ("standard", "soft") for temperature in (0.3, 0.7)]
    rollouts, grades = Journal(tmp_path / "rollouts.jsonl"), Journal(tmp_path / "grades.jsonl")
    for one in settings:
        roll_out(model, TEXT, found.problems, one, rollouts, batch_rows=8)
    assert [len(call["prompts"]) for call in calls] == [2, 1] * 4  # two problems of four rollouts are eight rows
    assert all(call["seed"] == 5 and call["max_new_tokens"] == 16 and "top_k" not in call and "top_p" not in call for call in calls)
    assert {tuple(call["keys"]) for call in calls} <= {(0, 1), (2,), (1, 2), (0,), (0, 2), (1,)}
    grade(found, settings, rollouts, grades, sandbox=lambda: sandbox, workers=2)

    got = summarize(settings, [0, 1, 2], 2, rollouts, grades)
    soft, standard = got["modes"]["soft"], got["modes"]["standard"]
    # Pass@2 of 4 by hand: 3 right: 1 - 0/6; 1 right: 1 - C(3,2)/6 = 0.5; 0 right: 0
    assert soft["score"]["value"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert standard["fixed"]["0.3"]["value"] == 0
    assert (standard["temperature"], standard["score"]["value"]) == (0.7, pytest.approx(1 / 3))
    assert soft["temperature"] == 0.3  # the lowest of equals
    assert soft["split_half"]["value"] == pytest.approx(0.5)
    [pair] = got["pairs"]
    assert (pair["first"], pair["second"], pair["difference"]["value"]) == ("standard", "soft", pytest.approx(1 / 6))
    assert (pair["mcnemar"]["only_first"], pair["mcnemar"]["only_second"]) == (0, 1)

    again = script(lambda *asked: pytest.fail("what is finished was asked again"))
    kept = Journal(tmp_path / "rollouts.jsonl")
    for one in settings:
        roll_out(model, TEXT, found.problems, one, kept, batch_rows=8)
    assert not again and len(kept) == 12


@pytest.mark.parametrize(
    ("change", "made"),
    [
        (lambda problem: (replace(problem, prompt=problem.prompt + " "), setting("soft", 0.5, 2)), True),  # a template with today's date
        (lambda problem: (replace(problem, stops=("x",)), setting("soft", 0.5, 2)), True),
        (lambda problem: (problem, replace(setting("soft", 0.5, 2), seed=6)), True),
        (lambda problem: (problem, replace(setting("soft", 0.5, 2), new_tokens=8)), True),
        (lambda problem: (problem, replace(setting("soft", 0.5, 2), n=1)), True),
        (lambda problem: (replace(problem, reference="other"), setting("soft", 0.5, 2)), False),  # changes the grade alone
    ],
)
def test_an_answer_serves_only_what_made_it(
    data: Path, script: Any, isometric_model: Callable[..., FullBandModel], change: Any, made: bool
) -> None:
    [problem, *_] = load_problems(TASKS["humaneval"], "base", ChatTemplate(), data, None).problems
    calls, journal, model = script(lambda prompt, *asked: RIGHT), Journal(), isometric_model(context=512)
    for _ in range(2):
        roll_out(model, TEXT, [problem], setting("soft", 0.5, 2), journal)
    assert len(calls) == 1
    other, asked = change(problem)
    roll_out(model, TEXT, [other], asked, journal)
    assert len(calls) == 1 + made and len(journal) == 1


def test_a_grade_serves_only_what_made_it(data: Path, script: Any, isometric_model: Callable[..., FullBandModel], monkeypatch: Any) -> None:
    """Other answers, another reference and other graders judge anew; a right answer becomes wrong where the data say another number."""
    found = load_problems(TASKS["gsm8k"], "base", ChatTemplate(), data, 1)
    asked, rollouts, grades = setting("standard", 0.0, 1, "gsm8k"), Journal(), Journal()
    script(lambda *asked: "#### 1")
    roll_out(isometric_model(context=2048), TEXT, found.problems, asked, rollouts)
    graded: list[int] = []
    [key] = [asked.key(problem) for problem in found.problems]
    grade(found, [asked], rollouts, grades, done=graded.append)
    grade(found, [asked], rollouts, grades, done=graded.append)
    assert graded == [1] and grades[key]["verdicts"] == ["right"]
    other = replace(found, problems=[replace(found.problems[0], reference="#### 2")])
    grade(other, [asked], rollouts, grades, done=graded.append)
    assert graded == [1, 1] and grades[key]["verdicts"] == ["wrong"]
    monkeypatch.setattr("fullband.evaluate.generative.grades.grader_hash", lambda: "new")
    grade(other, [asked], rollouts, grades, done=graded.append)
    assert graded == [1, 1, 1]


def test_interrupted_rollouts_go_on(data: Path, script: Any, isometric_model: Callable[..., FullBandModel], tmp_path: Path) -> None:
    found = load_problems(TASKS["humaneval"], "base", ChatTemplate(), data, None)
    path = tmp_path / "rollouts.jsonl"
    calls = script(lambda prompt, *asked: RIGHT)
    roll_out(isometric_model(context=512), TEXT, found.problems[:1], setting("soft", 0.5, 2), Journal(path))
    path.write_bytes(path.read_bytes() + b'["humaneval/base/soft/0.5/1", {"cut": 0, "roll')  # killed while it wrote
    journal = Journal(path)
    roll_out(isometric_model(context=512), TEXT, found.problems, setting("soft", 0.5, 2), journal)
    assert [call["keys"] for call in calls] == [[0], [1, 2]]
    assert len(Journal(path)) == len(journal) == 3


def test_mathematics(data: Path, script: Any, isometric_model: Callable[..., FullBandModel], tmp_path: Path) -> None:
    """One greedy answer; strictly right, right in its last number only, cut off."""

    def answer(prompt: str, mode: str, temperature: float, sample: int) -> str:
        assert temperature == 0
        asked = int(prompt.rsplit("What is ", 1)[1][0])
        return ["so #### 1", "it is 2", "well…"][asked]

    script(answer)
    numbers, rollouts, grades = [0, 1, 2], Journal(), Journal()
    for prompts in ("base", "chat"):
        found = load_problems(TASKS["gsm8k"], prompts, ChatTemplate(), data, None)  # type: ignore[arg-type]
        one = replace(setting("standard", 0.0, 1, "gsm8k"), prompts=prompts)
        roll_out(isometric_model(context=4096), TEXT, found.problems, one, rollouts)
        grade(found, [one], rollouts, grades)
        got = summarize([one], numbers, 1, rollouts, grades)["modes"]["standard"]
        assert got["score"]["value"] == pytest.approx(1 / 3 if prompts == "base" else 2 / 3)
        assert got["wilson"][0] < got["score"]["value"] < got["wilson"][1]
        assert (got["lengths"]["median"], got["lengths"]["finished"], got["lengths"]["truncated"]) == (8, 2, 1)
    assert found.problems[0].prompt.startswith("<|im_start|>user\nWhat is 0 + 1?\n\nReason step by step.")
    assert found.problems[0].prompt.endswith("<|im_start|>assistant\n")


def test_long_prompts_lose_their_beginning_and_are_counted(data: Path, script: Any, isometric_model: Callable[..., FullBandModel]) -> None:
    calls = script(lambda *asked: "#### 1")
    found: ProblemSet = load_problems(TASKS["gsm8k"], "base", ChatTemplate(), data, 2)
    journal, one = Journal(), setting("soft", 0.0, 1, "gsm8k")
    roll_out(isometric_model(context=64), TEXT, found.problems, one, journal)
    assert all(len(prompt) == 48 for prompt in calls[0]["prompts"])
    assert journal[one.key(0)]["cut"] == len(found.problems[0].prompt) - 48
    with pytest.raises(ValueError, match="answers of 16 tokens leave no room for a prompt in a context of 16"):
        roll_out(isometric_model(context=16), TEXT, found.problems, one, Journal())


def test_a_shard_has_every_nth_problem_with_the_same_prompt(data: Path) -> None:
    whole = load_problems(TASKS["gsm8k"], "base", ChatTemplate(), data, None)
    parts = [load_problems(TASKS["gsm8k"], "base", ChatTemplate(), data, None, (index, 2)) for index in range(2)]
    assert [[problem.number for problem in part.problems] for part in parts] == [[0, 2], [1]]
    assert sorted((p for part in parts for p in part.problems), key=lambda p: p.number) == whole.problems
