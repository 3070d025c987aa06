"""Recipes: whatever is wrong with one is said in one line that names the file, the key and the nearest known key."""

import pytest
import yaml

from fullband.config import FilesSource, Recipe, TaskSource, load_recipe, parse
from fullband.feedback_config import FeedbackConfig

GOOD = {"name": "a", "model": {"preset": "tiny"}, "train": {"steps": 10}}


def write(tmp_path, changes=None, text=None):
    raw = yaml.safe_load(yaml.safe_dump(GOOD))
    for key, value in (changes or {}).items():
        *parents, leaf = key.split(".")
        node = raw
        for parent in parents:
            node = node.setdefault(parent, {})
        if value is ...:
            del node[leaf]
        else:
            node[leaf] = value
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(raw) if text is None else text, encoding="utf-8")
    return path


def problem(path, overrides=()):
    with pytest.raises(ValueError) as caught:
        load_recipe(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


def test_a_good_recipe_loads_with_its_defaults(tmp_path):
    recipe = load_recipe(write(tmp_path))
    assert recipe.train.steps == 10 and recipe.feedback == FeedbackConfig() and recipe.data.source.kind == "python-stdlib"
    assert parse(Recipe, recipe.model_dump(mode="json"), "again") == recipe


BAD = {
    "unknown key": ({"modle": {}}, "modle: unknown key; did you mean 'model'?"),
    "unknown nested key": ({"optim.matrix_rl": 1}, "optim.matrix_rl: unknown key; did you mean 'matrix_lr'?"),
    "unknown key of a source": (
        {"data.source": {"kind": "files", "path": ["a"]}},
        "data.source.path: unknown key; did you mean 'paths'? (and 1 more)",
    ),
    "unknown key in a phase": (
        {"feedback.schedule": [{"fraction": 1, "passes": {1: 1}, "pases": 2}]},
        "feedback.schedule.0.pases: unknown key; did you mean 'passes'?",
    ),
    "unknown source": (
        {"data.source": {"kind": "filez"}},
        "data.source: input tag 'filez' found using 'kind' does not match any of the expected tags: "
        "'task', 'files', 'huggingface', 'python-stdlib'",
    ),
    "missing key": ({"train.steps": ...}, "train.steps: required, but not given"),
    "missing section": ({"model": ...}, "model: required, but not given"),
    "wrong type": (
        {"train.steps": "many"},
        "train.steps: must be a whole number, got 'many'",
    ),
    "section is a value": ({"train": 3}, "train: must be a section of keys, got 3"),
    "section is empty": ({"optim": None}, "optim: must be a section of keys, got None"),
    "too small": ({"train.steps": 0}, "train.steps: must be greater than 0, got 0"),
    "not a choice": (
        {"feedback.prefix": "sometimes"},
        "feedback.prefix: must be 'uniform', 'shared', 'per-row', 'answer' or 'off', got 'sometimes'",
    ),
    "K < 1": (
        {"feedback.schedule": [{"fraction": 1, "passes": {0: 1}}]},
        "feedback.schedule.0: passes: numbers of passes must be at least 1 (1 = without feedback), got 0",
    ),
    "negative probability": (
        {"feedback.schedule": [{"fraction": 1, "passes": {1: 2, 2: -1}}]},
        "feedback.schedule.0: passes: probabilities must not be negative, got -1.0 for 2 passes",
    ),
    "probabilities": (
        {"feedback.schedule": [{"fraction": 0.5, "passes": {1: 1}}, {"fraction": 0.5, "passes": {1: 0.5}}]},
        "feedback.schedule.1: passes: probabilities must sum to 1, got 0.5",
    ),
    "probability is nan": (
        {"feedback.schedule": [{"fraction": 1, "passes": {1: float("nan")}}]},
        "feedback.schedule.0.passes.1: must be a finite number",
    ),
    "probability is a word": (
        {"feedback.schedule": [{"fraction": 1, "passes": {1: "all"}}]},
        "feedback.schedule.0.passes.1: must be a number, got 'all'",
    ),
    "fraction": (
        {"feedback.schedule": [{"fraction": 2, "passes": {1: 1}}]},
        "feedback.schedule.0.fraction: must be at most 1",
    ),
    "schedule is a number": ({"feedback.schedule": 3}, "feedback.schedule: must be text or a list, got 3"),
    "feedback passes": (
        {"evaluation.feedback_passes": [0, -1]},
        "evaluation.feedback_passes.1: must be at least 0 or 'exact' or 'converged', got -1",
    ),
    "microbatches": ({"train.microbatch_rows": 5}, "train: batch_rows (32) must be a multiple of microbatch_rows (5)"),
    "name": ({"name": "../x"}, "name: string should match pattern"),
    "two problems": ({"train.steps": 0, "seed": -1}, "seed: must be at least 0, got -1 (and 1 more)"),
    "adaptive floor of 0 could never rise": (
        {"feedback.adaptive": {"floor": 0}},
        "feedback.adaptive.floor: must be greater than 0",
    ),
}


@pytest.mark.parametrize("changes, expected", BAD.values(), ids=BAD)
def test_bad_recipes_name_the_key(tmp_path, changes, expected):
    assert problem(write(tmp_path, changes)).startswith(expected)


FILES = {
    "empty": ("", "a recipe is a mapping of keys; this file holds nothing"),
    "list": ("- a\n- b\n", "a recipe is a mapping of keys; this file holds list"),
    "yaml": ("a: [1,\nb: 2\n", "not readable as yaml: "),
    "tabs": ("a:\n\t- b\n", "not readable as yaml: "),
}


@pytest.mark.parametrize("text, expected", FILES.values(), ids=FILES)
def test_files_that_are_no_recipes(tmp_path, text, expected):
    assert problem(write(tmp_path, text=text)).startswith(expected)


def test_unreadable_files(tmp_path, monkeypatch):
    assert problem(tmp_path / "none.yaml") == "no such recipe file"
    assert problem(tmp_path) == "a folder without a recipe.yaml: give a recipe file or a run folder"
    binary = tmp_path / "b.yaml"
    binary.write_bytes(b"\xff\xfe\x00\x80")
    assert problem(binary).startswith("not readable as yaml")

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    path = write(tmp_path)
    monkeypatch.setattr(type(path), "read_text", refuse)
    assert problem(path) == "not readable as yaml: [Errno 13] Permission denied"


def test_overrides(tmp_path):
    path = write(tmp_path)
    recipe = load_recipe(path, ["train.steps=20", "optim.matrix_lr=1e-3", "data.source={kind: task, group: Z7}", "feedback.prefix=off"])
    assert recipe.train.steps == 20 and recipe.optim.matrix_lr == 1e-3 and recipe.feedback.prefix == "off"
    assert recipe.data.source == TaskSource(group="Z7")
    recipe = load_recipe(
        path, ["feedback.schedule=[{fraction: 1, passes: {1: 0.5, 2: 0.5}}]", "data.source.kind=files", "data.source.paths=[a.txt]"]
    )
    assert recipe.feedback.schedule[0].passes == {1: 0.5, 2: 0.5} and recipe.data.source == FilesSource(paths=["a.txt"])


@pytest.mark.parametrize(
    "override, expected",
    [
        ("train.steps", "--set train.steps: expected key.path=value"),
        ("=3", "--set =3: expected key.path=value"),
        ("name.first=3", "--set name.first=3: name is a value, not a section"),
        ("seed=[1", "--set seed=[1: the value is not yaml ("),
        ("train.stepz=3", "train.stepz: unknown key; did you mean 'steps'?"),
        ("train.steps=few", "train.steps: must be a whole number, got 'few'"),
    ],
)
def test_bad_overrides(tmp_path, override, expected):
    assert problem(write(tmp_path), [override]).startswith(expected)


def test_a_bare_off_is_the_word(tmp_path):
    path = write(tmp_path, text="name: a\nmodel: {preset: tiny}\ntrain: {steps: 1}\nfeedback: {prefix: off, schedule: none}\n")
    assert load_recipe(path).feedback.prefix == "off" and load_recipe(path).feedback.schedule == "none"


def test_shapes_that_do_not_fit(trunk_config):
    for change in ({"kv_heads": 3}, {"width": 15}, {"head_dim": 5}, {"head_dim": 0}, {"head_dim": -2}, {"layers": 0}, {"window": 0}):
        with pytest.raises(ValueError):
            trunk_config(**change)
