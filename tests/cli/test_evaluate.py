"""`fullband evaluate` and `fullband compare`: a whole evaluation on small data, resumed, in shards, and what they refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from cli.commands import Trained, checkpoint_of, fullband, refused
from fullband.evaluate.harness.choice import requests_of
from fullband.evaluate.harness.model import FullBandLM
from fullband.evaluate.harness.scoring import Continuation
from fullband.evaluate.harness.tasks import load_benchmarks
from fullband.evaluate.journal import Journal
from fullband.evaluate.plan import files_hash
from fullband.files import alone_in
from fullband.model import FullBandModel
from reference.seam import read

SUMS = [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(6)]
ARC = [
    {"id": str(i), "question": f"{i}?", "choices": {"text": ["yes", "no"], "label": ["A", "B"]}, "answerKey": "AB"[i % 2]} for i in range(6)
]


def write_data(folder: Path, name: str, rows: list[dict[str, Any]], splits: tuple[str, ...], configuration: str = "default") -> None:
    (folder / name).mkdir(parents=True, exist_ok=True)
    for split in splits:
        (folder / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in splits)
    text = f"---\nconfigs:\n- config_name: {configuration}\n  data_files:\n{files}---\n"
    (folder / name / "README.md").write_text(text, encoding="utf-8")


@pytest.fixture(scope="module", autouse=True)
def offline() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data(folder, "arc_easy", ARC, ("train", "validation", "test"), "ARC-Easy")
    write_data(folder, "gsm8k", SUMS, ("train", "test"), "main")
    return folder


@pytest.fixture(scope="module")
def arguments(text_run: Trained, data: Path) -> list[Any]:
    """Two tasks in every way; answers of few tokens."""
    return [
        "evaluate", text_run.folder, "arc_easy", "gsm8k", "--data-dir", data, "--limit", 4, "--shots", 1,
        "--feedback-passes", "0,1,exact,soft", "--modes", "standard,fused", "--max-new-tokens", 8, "--device", "cpu",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def whole(arguments: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    done = fullband(*arguments, "-o", folder, "--json")
    assert done.code == 0, done.err
    assert done.json == json.loads((folder / "results.json").read_text())
    return folder


def test_results(whole: Path, text_run: Trained) -> None:
    found = json.loads((whole / "results.json").read_text())
    assert found["smoke_test"] is True
    assert len(found["model"]["weights"]) == 64
    assert {"fullband", "torch", "lm_eval"} <= found["versions"].keys()
    task = found["tasks"]["arc_easy"]
    assert (task["documents"], task["shots"], task["metric"]) == (4, 1, "acc_norm")
    assert list(task["readings"]) == ["0", "1", "exact", "soft"]
    assert [one["second"] for one in task["differences"]] == ["1", "exact", "soft"]
    assert task["readings"]["0"]["value"] in (0, 0.25, 0.5, 0.75, 1)
    assert task["data_hash"] and task["prompt_hash"] and task["seconds"] > 0
    answers = found["generative"]["gsm8k"]
    assert answers["problems"] == 4 and list(answers["modes"]) == ["standard", "fused"]
    assert answers["modes"]["fused"]["feedback_passes"] == 1
    rollouts = [json.loads(line)[:2] for line in (whole / "rollouts.jsonl").read_text().splitlines()]
    assert len(rollouts) == 8 and all(record["rollouts"][0]["tokens"] <= 8 for _, record in rollouts)


def test_log_likelihoods_are_those_of_the_slow_reading(whole: Path, text_run: Trained, data: Path) -> None:
    """Of a trained model: one row at a time, without padding."""
    model, lm = FullBandModel.load(text_run.folder), FullBandLM(text_run.folder)
    [benchmark] = load_benchmarks(["arc_easy"], 1, data)
    [instances] = requests_of(benchmark, 4).values()
    scores, checked = Journal(whole / "scores.jsonl"), 0
    for instance in instances:
        context, continuation = (tuple(ids) for ids in lm._encode_pair(*instance.args))
        inputs = torch.tensor([(context + continuation)[-49:-1]])
        for passes in (0, 1, "exact"):
            states = read(model, inputs, passes)[0, -len(continuation) :]
            expected = F.log_softmax(model.trunk.head(states), -1).gather(1, torch.tensor(continuation)[:, None]).sum().item()
            assert scores[Continuation(context, continuation).key][str(passes)][0] == pytest.approx(expected, abs=1e-3)
            checked += 1
    assert checked == 24 and len(scores) == 8


def test_reports(whole: Path) -> None:
    text, page = (whole / "report.md").read_text(), (whole / "report.html").read_text()
    for report in (text, page):
        assert "Smoke test" in report and "Accuracy by feedback passes".lower() in report.lower()
        assert "GSM8K" in report and "the modes side by side" in report
    assert 'src="http' not in page and 'href="http' not in page and "<link" not in page and "<svg" in page
    assert (whole / "figure-5.svg").is_file() and "![free-form scores by mode](figure-5.svg)" in text


def test_a_finished_evaluation_is_not_run_again(whole: Path, arguments: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before = (whole / "results.json").read_bytes()
    monkeypatch.setattr("fullband.evaluate.evaluation.score_benchmark", lambda *asked: pytest.fail("scored again"))
    monkeypatch.setattr("fullband.evaluate.evaluation.roll_out", lambda *asked: pytest.fail("answered again"))
    done = fullband(*arguments, "-o", whole)
    assert done.code == 0 and f"continuing {whole}" in done.err.replace("\n", "")
    assert (whole / "results.json").read_bytes() == before


def test_an_interrupted_evaluation_goes_on(whole: Path, arguments: list[Any], tmp_path: Path) -> None:
    """Without its last finished task and half of its scores and answers, it ends with the same numbers."""
    part = tmp_path / "part"
    shutil.copytree(whole, part)
    for name, kept in (("tasks", 0), ("documents", 0), ("scores", 3), ("rollouts", 3), ("grades", 1)):
        lines = (part / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (part / f"{name}.jsonl").write_text("".join(lines[:kept]))
    assert fullband(*arguments, "-o", part).code == 0
    assert numbers(part) == numbers(whole)


def test_shards_become_one(whole: Path, arguments: list[Any], tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    assert fullband(*arguments, "-o", folder, "--shard", "1/2").code == 0
    assert "of 2 shards 2 is missing" in refused("compare", folder)
    assert fullband(*arguments, "-o", folder, "--shard", "2/2").code == 0
    assert fullband("compare", folder).code == 0
    assert numbers(folder) == numbers(whole)


def numbers(folder: Path) -> Any:
    """All but times, and hashes of prompts, of which each shard has its own."""
    found = json.loads((folder / "results.json").read_text())
    for task in (*found["tasks"].values(), *found["generative"].values()):
        del task["seconds"], task["prompt_hash"]
    return found["tasks"], found["generative"], found["mean"]


def test_runs_side_by_side(whole: Path, arguments: list[Any], tmp_path: Path) -> None:
    done = fullband("compare", whole, whole, "--json")
    rows = done.json["rows"]
    assert [row["benchmark"] for row in rows] == ["arc_easy"] * 8 + ["gsm8k"] * 4
    assert all(row["difference"]["value"] == 0 for row in rows[1::2])
    assert "Smoke test: Runs side by side" in fullband("compare", whole, whole).out


def test_a_baseline_stands_beside_the_plain_reading(text_run: Trained, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    asked = ["evaluate", text_run.folder, "arc_easy", "--data-dir", data, "--limit", 4, "--baseline", text_run.folder, "-o", folder]
    done = fullband(*asked, "--device", "cpu", "--json")
    task = done.json["tasks"]["arc_easy"]
    assert task["baseline"]["value"] == task["readings"]["0"]["value"]  # it is the same model
    assert (task["differences"][-1]["first"], task["differences"][-1]["second"]) == ("baseline", "0")
    assert "baseline" in (folder / "report.md").read_text()


def test_dry_run_prints_prompts_and_reads_no_model(arguments: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fullband.loading.load_model", lambda *asked, **more: pytest.fail("read the model"))
    done = fullband(*arguments, "--dry-run")
    assert "Question: 0?\nAnswer:" in done.out and "→ ' yes'" in done.out and "Question: What is 0 + 1?" in done.out
    first = fullband(*arguments, "--dry-run", "--json").json["prompts"][0]
    assert first["task"] == "arc_easy" and first["continuations"] == [" yes", " no"] and first["tokens"] > 20


def no_split(folder: Path) -> list[Any]:
    write_data(folder / "data", "arc_easy", ARC, ("train",), "ARC-Easy")
    return ["arc_easy", "--data-dir", folder / "data"]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (lambda folder: ["arc_esy"], "unknown task 'arc_esy'; did you mean arc_easy"),
        (lambda folder: ["mmlu_stem"], "'mmlu_stem' is a group of tasks"),
        (lambda folder: ["--suite", "paper"], "unknown suite 'paper' (known: paper-mc, paper-0shot, gsm8k, math500, humaneval, mbpp)"),
        (lambda folder: [], "nothing to evaluate: name a task or a suite"),
        (no_split, "arc_easy asks questions of the split 'test', which is not there (there are: train)"),
        (lambda folder: ["arc_easy", "--data-dir", folder / "none"], "none: no such folder of data"),
        (lambda folder: ["arc_easy", "--baseline", folder / "none"], "none: no such model folder"),
        (lambda folder: ["arc_easy", "--data-dir", folder], "no data for arc_easy: a folder named arc_easy"),
        (lambda folder: ["arc_easy", "--feedback-passes", "few"], "--feedback-passes: must be 0, 1, 2, …, exact or converged, got 'few'"),
        (lambda folder: ["gsm8k", "--modes", "hard"], "unknown mode 'hard'"),
        (lambda folder: ["gsm8k", "--prompts", "long"], "--prompts: must be base or chat, got 'long'"),
        (lambda folder: ["gsm8k", "--shard", "3/2"], "a shard must be i/n with 1 ≤ i ≤ n, got 3/2"),
        (lambda folder: ["gsm8k", "--k", "11"], "n must be at least k for Pass@k, and k at least 1, got n = 10, k = 11"),
        (lambda folder: ["gsm8k", "--temperatures", "0"], "temperatures of code samples must be above 0"),
        (lambda folder: ["gsm8k", "--temperatures", "inf"], "temperatures of code samples must be above 0"),
        (lambda folder: ["mbpp", "--temperatures", "0.3,0.3000001"], "temperatures must differ, in six digits, got 0.3, 0.3000001"),
        (lambda folder: ["gsm8k", "--fused-passes", "some"], "--fused-passes: must be 0, 1, 2, …, exact or converged, got 'some'"),
    ],
)
def test_one_line(text_run: Trained, tmp_path: Path, more: Callable[[Path], list[Any]], expected: str) -> None:
    assert expected in refused("evaluate", text_run.folder, *more(tmp_path), "-o", tmp_path / "out")
    assert not list((tmp_path / "out").rglob("*.jsonl"))


def test_a_model_without_tokenizer(text_run: Trained, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(checkpoint_of(text_run.folder), model)
    for path in model.glob("*tokenizer*"):
        path.unlink()
    assert f"{model}: no tokenizer in this folder" in refused("evaluate", model, "arc_easy")


def test_a_folder_that_cannot_be_written(text_run: Trained, data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    line = refused("evaluate", text_run.folder, "arc_easy", "--data-dir", data, "-o", tmp_path / "file" / "out")
    assert str(tmp_path / "file") in line


def test_a_folder_with_another_evaluation(whole: Path, arguments: list[Any]) -> None:
    assert "holds an evaluation with another shots" in refused(*arguments, "--shots", 0, "-o", whole)


def test_a_folder_is_refused_before_any_work(whole: Path, arguments: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A baseline that the report could not lay beside this, another model's, and answers of nobody knows which model."""
    monkeypatch.setattr("fullband.evaluate.evaluation.evaluate", lambda *asked, **more: pytest.fail("worked"))
    part, beside = tmp_path / "part", tmp_path / "part" / "baseline"
    shutil.copytree(whole, part)
    shutil.copytree(whole, beside)
    plan = json.loads((beside / "plan.json").read_text())
    (beside / "plan.json").write_text(json.dumps(plan | {"readings": [0], "modes": ["standard"], "limit": 2}))
    name = plan["model"]["name"]
    expected = (
        f"{beside}: asked with another limit (2 there) than this evaluation; evaluate again with --baseline {name}, or remove that folder"
    )
    assert refused(*arguments, "-o", part) == f"error: {expected}"
    line = refused(*arguments, "--baseline", checkpoint_of(Path(name)), "-o", part)
    assert f"{beside}: holds an evaluation with another model (name); choose another --output" in line
    (part / "plan.json").unlink()
    assert f"{part}: has scores.jsonl but no plan.json that names its model" in refused(*arguments, "-o", part)


def test_another_limit_keeps_the_answers_that_there_are(whole: Path, arguments: list[Any], tmp_path: Path) -> None:
    """Fewer documents need no model; more of them give what the whole evaluation does."""
    part = tmp_path / "part"
    shutil.copytree(whole, part)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("scoring.states_after_shared", "scoring.states_of_whole"):
            patch.setattr(f"fullband.evaluate.harness.{name}", lambda *asked: pytest.fail("read again"))
        patch.setattr("fullband.evaluate.generative.rollouts.generate_texts", lambda *asked, **more: pytest.fail("answered again"))
        fewer = fullband(*arguments, "--limit", 2, "-o", part, "--json").json
    assert fewer["plan"]["limit"] == 2 == fewer["tasks"]["arc_easy"]["documents"] == fewer["generative"]["gsm8k"]["problems"]
    assert fullband(*arguments, "--limit", 2, "-o", tmp_path / "alone").code == 0
    assert numbers(part) == numbers(tmp_path / "alone")
    for name, kept in (("scores", 5), ("rollouts", 3)):  # what two documents left would be
        lines = (part / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (part / f"{name}.jsonl").write_text("".join(lines[:kept]))
    assert fullband(*arguments, "-o", part).code == 0
    assert numbers(part) == numbers(whole)


def test_other_data_redo_what_they_change(whole: Path, arguments: list[Any], data: Path, tmp_path: Path) -> None:
    """Another --data-dir in the same folder: nothing of the first data stays, whatever the limit; what is asked alike is not made again."""
    other, mixed, alone = tmp_path / "data", tmp_path / "mixed", tmp_path / "alone"
    shutil.copytree(whole, mixed)
    sums = [SUMS[0] | {"answer": "#### 9"}, *({"question": f"And {i} + 2?", "answer": f"#### {i + 2}"} for i in range(1, 4))]
    write_data(other, "arc_easy", ARC[::-1][:3], ("train", "validation", "test"), "ARC-Easy")
    write_data(other, "gsm8k", sums, ("test",), "main")
    write_data(other, "gsm8k", SUMS, ("train",), "main")
    write_data(other, "gsm8k", sums, ("test",), "main")
    (other / "gsm8k" / "README.md").write_text((data / "gsm8k" / "README.md").read_text())
    asked = [other if one == data else 6 if one == 4 else one for one in arguments]
    for folder in (mixed, alone):
        assert fullband(*asked, "-o", folder).code == 0
    assert numbers(mixed) == numbers(alone) != numbers(whole)
    hashes = [[found[kind][name]["prompt_hash"] for kind, name in (("tasks", "arc_easy"), ("generative", "gsm8k"))]
              for found in (json.loads((folder / "results.json").read_text()) for folder in (mixed, alone))]  # fmt: skip
    assert hashes[0] == hashes[1]


def test_comparing_what_is_no_evaluation(tmp_path: Path) -> None:
    assert f"{tmp_path}: no evaluation there" in refused("compare", tmp_path)
    (tmp_path / "results.json").write_text('{"settings": []}')  # a probe's
    assert f"{tmp_path / 'results.json'}: has no 'model'; it was not written by fullband evaluate" in refused("compare", tmp_path)
    for content, words in (
        ("", "not readable"),
        ("{}", "nothing to evaluate"),
        ('{"model": 3, "tasks": 5}', "tasks"),
        ('{"n": 1, "m": 2}', "m: "),
    ):
        (tmp_path / "plan.json").write_text(content)
        line = refused("compare", tmp_path)
        assert str(tmp_path / "plan.json") in line and words in line


@pytest.mark.parametrize("name", ["documents", "rollouts", "grades"])
def test_a_line_that_was_damaged_is_made_again(whole: Path, arguments: list[Any], tmp_path: Path, name: str) -> None:
    """The numbers of what is left are not reported as those of the whole."""
    part = tmp_path / "part"
    shutil.copytree(whole, part)
    journal = part / f"{name}.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join([lines[0], "damage\n", *lines[2:]]))
    assert f"{journal}:2: damaged; remove the line" in refused("compare", part)
    journal.write_text("".join([lines[0], *lines[2:]]))
    assert "is not finished; run the same command again" in refused("compare", part)
    assert "is not finished" in refused("compare", whole, part)
    assert fullband(*arguments, "-o", part).code == 0
    assert numbers(part) == numbers(whole)


@pytest.mark.parametrize("name", ["rollouts", "grades"])
def test_an_answer_to_older_data_behind_a_removed_line_is_made_again(whole: Path, arguments: list[Any], tmp_path: Path, name: str) -> None:
    part = tmp_path / "part"
    shutil.copytree(whole, part)
    journal = part / f"{name}.jsonl"
    *lines, last = journal.read_text().splitlines(keepends=True)
    key, record, _ = json.loads(last)
    journal.write_text("".join([*lines, json.dumps([key, record | {"made_of": "other data"}]) + "\n"]))
    assert "is not finished; run the same command again" in refused("compare", part)
    assert fullband(*arguments, "-o", part).code == 0
    assert numbers(part) == numbers(whole)


def test_an_evaluation_within_the_models_folder_goes_on(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    before = files_hash(tmp_path)
    (tmp_path / "evaluation").mkdir()
    for name in ("plan.json", "results.json"):
        (tmp_path / "evaluation" / name).write_text("{}")
    assert files_hash(tmp_path) == before
    (tmp_path / "evaluation" / "config.json").write_text("{}")
    assert files_hash(tmp_path) != before


def test_an_evaluation_whose_rollouts_have_no_questions(whole: Path, tmp_path: Path) -> None:
    """They were not always kept. Neither the folder nor a results.json that stands alone needs them."""
    old, published = tmp_path / "old", tmp_path / "published"
    shutil.copytree(whole, old)
    rollouts = [json.loads(line)[:2] for line in (old / "rollouts.jsonl").read_text().splitlines()]
    for _, record in rollouts:
        del record["question"]
    (old / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rollouts))
    assert fullband("compare", old).code == 0 and fullband("compare", whole, old).code == 0
    results = json.loads((old / "results.json").read_text())
    for trace in results["generative"]["gsm8k"]["traces"]:
        del trace["question"]
    published.mkdir()
    (published / "results.json").write_text(json.dumps(results))
    assert fullband("compare", published).code == 0
    assert "the modes side by side" in (published / "report.md").read_text()


def test_two_processes_on_one_folder(whole: Path, arguments: list[Any]) -> None:
    with alone_in(whole):
        done = fullband(*arguments, "-o", whole)
    assert done.code == 2 and f"error: {whole}: another process is at work there" in done.err
    assert fullband("compare", whole).code == 0


def test_what_cannot_be_asked_is_said_first(arguments: list[Any], tmp_path: Path) -> None:
    long = fullband(*arguments, "--max-new-tokens", 48, "-o", tmp_path / "long")
    assert long.code == 2 and "error: gsm8k: answers of 48 tokens leave no room for a prompt in a context of 48; ask for fewer" in long.err
    assert not (tmp_path / "long" / "scores.jsonl").exists()
    many = fullband(*arguments, "--shots", 7, "-o", tmp_path / "shots")
    assert many.code == 2 and "error: arc_easy: 7 examples for a prompt cannot be drawn" in many.err


@pytest.mark.parametrize(
    ("dtype", "device", "words"), [("int8", "cpu", "dtype: must be one of"), ("float32", "abacus", "device: 'abacus' is not")]
)
def test_the_model_of_lm_eval_refuses(text_run: Trained, dtype: str, device: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FullBandLM(text_run.folder, device=device, dtype=dtype)


@pytest.mark.slow
def test_lm_eval_knows_the_model(text_run: Trained, tmp_path: Path) -> None:
    """Through lm-eval's own command, on a task that is defined in a folder."""
    rows = "".join(json.dumps({"text": f"{i} is", "more": f" {i}"}) + "\n" for i in range(3))
    (tmp_path / "rows.jsonl").write_text(rows)
    task = {
        "task": "counting", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "output_type": "multiple_choice", "test_split": "test", "doc_to_text": "{{text}}", "doc_to_target": 0,
        "doc_to_choice": "{{[more, ' x']}}", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    (tmp_path / "counting.yaml").write_text(json.dumps(task))
    model = f"pretrained={text_run.folder},mode=fused,feedback_passes=2"
    asked = ["lm-eval", "run", "--model", "fullband", "--model_args", model, "--tasks", tmp_path / "counting.yaml", "--batch_size", "2"]
    done = fullband(*asked)
    assert done.code == 0 and "counting" in done.out and "acc" in done.out
