"""Program-like text: answers are true, programs depend on seed and number alone, and tokens are cut where the paper's are."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from fullband.config import ProgramTextSource
from fullband.data.build import build_source
from fullband.data.program_text import BITS, STATUS, ProgramText, completion, memory, registers
from fullband.data.tokenizers import load_tokenizer


def programs(count: int = 200, **settings: int) -> list[str]:
    source = build_source(ProgramTextSource(**settings))  # type: ignore[arg-type]
    return [text for _, text in islice(source.documents("train"), count)]


def test_the_inputs_of_appendix_f() -> None:
    assert completion(4, 9, 7, 2) == "required = 4\ncompleted = 9\nscratch = 7\nscratch += 0\nscratch += 0\nStatus:"
    assert memory(1, 0, [0, 1], 1) == "state = 1\nscratch = 0\nscratch ^= 0\nscratch ^= 1\nscratch += 0\n# final state:"
    text = registers([(4, 0), (4, 1)], 7, 4)
    assert text == "r4 = 0\nr4 = 1\nscratch = 7\n" + 8 * "scratch += 0\n" + "query = r4\nValue:"


def test_every_answer_follows_from_the_program() -> None:
    """Programs are run line by line."""
    asked, remarked = {"Status": 0, "# final state": 0, "Value": 0}, 0
    for program in programs():
        values: dict[str, str] = {}
        for line in filter(None, program.splitlines()):
            if ": " in line:
                question, answer = line.split(": ")
                asked[question] += 1
                if question == "Status":
                    assert answer == STATUS[values["required"] == values["completed"]]
                else:
                    assert answer == BITS[int(values[values["query"] if question == "Value" else "state"])]
            else:
                name, operation, value, *remark = line.split()
                values |= {name: value} if operation == "=" else {}
                if remark:
                    remarked += 1
                    assert remark == [STATUS[values["required"] == values["completed"]]]
    assert min(*asked.values(), remarked) > 100


def test_answers_are_balanced() -> None:
    text = "".join(programs(600))
    for first, second in ((" done", " more"), (" one", " zero")):
        assert text.count(first) / (text.count(first) + text.count(second)) == pytest.approx(0.5, abs=0.06)


def test_a_program_depends_on_seed_and_number() -> None:
    source = ProgramText(ProgramTextSource(seed=3))
    everything = list(islice(source.documents("train"), 20))
    cursor = everything[12][0]
    assert list(islice(source.documents("train", cursor), 8)) == everything[12:]
    assert programs(20, seed=3) == [text for _, text in everything] != programs(20, seed=4)
    assert source.fingerprint() != ProgramText(ProgramTextSource(seed=4)).fingerprint()


def test_held_out_programs_are_not_trained_on() -> None:
    source = ProgramText(ProgramTextSource(documents=500, validation_fraction=0.2))
    training, validation = ({cursor for cursor, _ in source.documents(split)} for split in ("train", "validation"))
    assert not training & validation and len(training | validation) == 500 and len(validation) > 50


def test_the_tokenizer_gives_text_back() -> None:
    tokenizer = load_tokenizer("program")
    for text in [*programs(20), "naïve_name = 1234  # €, tabs\t and words_with_1 digits", " r", "", "\r\n"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert all(0 <= token < tokenizer.vocab_size for token in tokenizer.encode("r7 = 1\nκ"))


def test_the_tokenizer_cuts_where_the_papers_does() -> None:
    tokenizer = load_tokenizer("program")
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode("r4 = 10\nscratch += 0\nquery = r0\nValue: one")]
    lines = [
        ["r", "4", " =", " ", "10", "\n"],
        ["scratch", " +=", " ", "0", "\n"],
        ["query", " =", " r", "0", "\n"],
        ["Value", ":", " one"],
    ]
    assert pieces == [piece for line in lines for piece in line]


def test_the_tokenizer_is_saved(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("program")
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert (again.name, again.encode("Status: done")) == (tokenizer.name, tokenizer.encode("Status: done"))
