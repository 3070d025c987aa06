"""App. F's counts, balance, grouping and lengths."""

from __future__ import annotations

from collections import Counter

import pytest

from fullband.data.program_text import NUMERALS
from fullband.data.tokenizers import load_tokenizer
from fullband.probe.examples import DELAYS, ProbeSetting, build_settings
from fullband.probe.inputs import ProbeInputs, encode_setting

COUNTS = {
    "completion": (80, 1600),
    "memory": (128, 1280),
    "registers m=1, 16 writes each": (128, 256),
    "registers m=2, 8 writes each": (128, 512),
    "registers m=4, 4 writes each": (128, 1024),
    "registers m=8, 2 writes each": (128, 2048),
    "registers m=8, 4 writes each": (128, 2048),
    "registers m=8, 8 writes each": (128, 2048),
}


@pytest.fixture(scope="module")
def settings() -> dict[str, ProbeSetting]:
    return {setting.name: setting for setting in build_settings()}


@pytest.fixture(scope="module")
def encoded() -> dict[str, ProbeInputs]:
    """The first eight groups of every setting, in tokens cut as the paper's are."""
    return {setting.name: encode_setting(setting, load_tokenizer("program")) for setting in build_settings(groups=8)}


def test_counts(settings: dict[str, ProbeSetting]) -> None:
    found = {name: (len({e.group for e in s.examples}), len(s.examples)) for name, s in settings.items()}
    assert found == COUNTS
    assert all(setting.groups == found[name][0] for name, setting in settings.items())
    sweep = [count for name, (_, count) in COUNTS.items() if name.startswith("registers") and "m=8, 4" not in name and "m=8, 8" not in name]
    assert sum(sweep) == 3840


def test_every_group_and_every_delay_is_balanced(settings: dict[str, ProbeSetting]) -> None:
    for setting in settings.values():
        for key in ("group", "updates"):
            labels = Counter((getattr(e, key), e.label) for e in setting.examples)
            assert all(labels[place, 0] == labels[place, 1] for place, _ in labels), (setting.name, key)
        assert len({e.text for e in setting.examples}) == len(setting.examples)


def test_partners_are_alike_but_for_the_answer(settings: dict[str, ProbeSetting]) -> None:
    for setting in settings.values():
        for first, second in zip(setting.examples[::2], setting.examples[1::2], strict=True):
            assert (first.group, first.updates, first.tails) == (second.group, second.updates, second.tails)
            assert first.label != second.label and len(first.text) == len(second.text)


def test_completion(settings: dict[str, ProbeSetting]) -> None:
    """Each of 80 pairs in all four assignments; every numeral as often in either field, and with either label."""
    assignments: dict[int, set[tuple[int, int]]] = {}
    used: Counter[tuple[str, int, int]] = Counter()
    for example in settings["completion"].examples:
        required, completed, _ = (int(line.split(" = ")[1]) for line in example.text.splitlines()[:3])
        assert example.label == (required == completed)
        assignments.setdefault(example.group, set()).add((required, completed))
        used.update([("required", required, example.label), ("completed", completed, example.label)])
    pairs = {frozenset(required for required, _ in group) for group in assignments.values()}
    assert len(pairs) == 80 and all(len(pair) == 2 for pair in pairs)
    assert all(len(group) == 4 for group in assignments.values())
    assert {number for _, number, _ in used} == set(NUMERALS)
    assert len(used) == 4 * len(NUMERALS) and len(set(used.values())) == 1


def test_memory_contexts_are_all_different_and_seen_with_both_states(settings: dict[str, ProbeSetting]) -> None:
    contexts: dict[int, set[str]] = {}
    for example in settings["memory"].examples:
        state, *rest = example.text.splitlines()
        assert state == f"state = {example.label}"
        contexts.setdefault(example.group, set()).add("".join(line for line in rest if line.startswith(("scratch = ", "scratch ^= "))))
    assert all(len(context) == 1 for context in contexts.values())
    assert len(set.union(*contexts.values())) == 128


def test_delays_are_null_updates(settings: dict[str, ProbeSetting]) -> None:
    for name in ("completion", "memory"):
        assert Counter(e.text.count("scratch += 0\n") for e in settings[name].examples).keys() == set(DELAYS)
        assert all(e.text.count("scratch += 0\n") == e.updates for e in settings[name].examples)


def test_registers(settings: dict[str, ProbeSetting]) -> None:
    """The label is the last bit written to the queried register; each is written equally often; the partner is the complement."""
    for setting in settings.values():
        if setting.task != "registers":
            continue
        for first, second in zip(setting.examples[::2], setting.examples[1::2], strict=True):
            a, b = (_writes(example.text) for example in (first, second))
            assert [register for register, _ in a] == [register for register, _ in b]
            assert all(x != y for (_, x), (_, y) in zip(a, b, strict=True))
            assert set(Counter(register for register, _ in a).values()) == {setting.writes_each}
            asked = first.text.split("query = ")[1].split("\n")[0]
            assert first.label == dict(a)[asked] and second.label == dict(b)[asked]
            assert first.text.count("scratch += 0\n") == 8
        queries = {(e.group, e.text.split("query = ")[1]) for e in setting.examples}
        assert len(queries) == 128 * (setting.registers or 0)


def _writes(text: str) -> list[tuple[str, int]]:
    return [(line[:2], int(line[-1])) for line in text.splitlines() if line.startswith("r")]


def test_lengths_are_the_papers(encoded: dict[str, ProbeInputs]) -> None:
    for name, inputs in encoded.items():
        lengths = {len(tokens) for tokens in inputs.tokens}
        assert lengths == set(inputs.lengths.values()) and not inputs.notes
        if name.startswith("registers"):
            assert lengths == {276 if "8, 4" in name else 468 if "8, 8" in name else 180}
        assert len({tokens[-1] for tokens in inputs.tokens}) == 1
        assert inputs.steps == {1: 1, 2: 2, 4: 4}
        differences = [sum(a != b for a, b in zip(x, y, strict=True)) for x, y in zip(inputs.tokens[::2], inputs.tokens[1::2], strict=True)]
        assert set(differences) <= {1, 16, 32, 64}


def test_adjustments_to_another_tokenizer_are_reported() -> None:
    tokenizer = load_tokenizer("bytes")
    completion, registers = (encode_setting(build_settings([task], groups=4)[0], tokenizer) for task in ("completion", "registers"))
    assert completion.steps == {1: 1, 2: len("Status:"), 4: len("0\nStatus:")}
    assert completion.shared == [ord(" ")] and completion.telling == (ord("m"), ord("d"))
    assert any("180" in note for note in registers.notes) and len({len(tokens) for tokens in registers.tokens}) == 1


def test_batches_keep_partners_together_and_lengths_apart(encoded: dict[str, ProbeInputs]) -> None:
    inputs = encoded["memory"]
    batches = list(inputs.batches(3 * len(inputs.tokens[0])))
    assert [i for rows in batches for i in range(rows.start, rows.stop)] == list(range(len(inputs.tokens)))
    assert all(rows.start % 2 == 0 and len({len(tokens) for tokens in inputs.tokens[rows]}) == 1 for rows in batches)


def test_examples_depend_on_the_seed_alone() -> None:
    assert build_settings(["memory"], seed=1) == build_settings(["memory"], seed=1) != build_settings(["memory"], seed=2)


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown probe task 'sums' \\(known: completion, memory, registers\\)"):
        build_settings(["sums"])  # type: ignore[list-item]
