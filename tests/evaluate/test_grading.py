"""Answers of GSM8K and MATH are found and graded right, each within its time limit."""

from __future__ import annotations

import gc
import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from fullband.evaluate.grading.gsm8k import chat_value, grade_gsm8k, reference_answer
from fullband.evaluate.grading.math_answers import LONGEST, MathGrader, math_answer, same_text
from fullband.evaluate.grading.math_shape import shapes

SOLUTION = "She makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18"
SECONDS = 10.0

PAIRS = [  # verdict, with ! if compared in every run; reference; answer
    tuple(part.strip() for part in f"{line} ".split(" | "))
    for line in Path(__file__).with_name("math_pairs.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]
MATH_500 = Path(os.environ.get("FULLBAND_SHARED", Path(__file__).parents[3] / "shared")) / "data/math500/test.jsonl"


@pytest.fixture(scope="module")
def grader() -> Iterator[MathGrader]:
    if os.environ.get("FULLBAND_CI") != "1":
        pytest.importorskip("math_verify")
    with MathGrader(seconds=SECONDS) as grader:
        yield grader


def test_pairs(grader):
    """Pairs that were judged wrongly once, and some of each kind."""
    for verdict, reference, answer in (pair for pair in PAIRS if pair[0].endswith("!")):
        assert grader.grade(reference, answer) == verdict.removesuffix("!"), (reference, answer)


@pytest.mark.slow
def test_all_pairs(grader):
    assert len(PAIRS) >= 500
    wrong = [(pair, verdict) for pair in PAIRS if (verdict := grader.grade(*pair[1:])) != pair[0].removesuffix("!")]
    assert wrong == []


@pytest.mark.shared_data
def test_references_are_found_in_their_solutions():
    for row in math_500():
        assert math_answer(row["solution"]) == row["answer"]


@pytest.mark.slow
@pytest.mark.shared_data
def test_references_are_themselves_and_no_other(grader):
    """Values are really compared: the copy is written with other sizes and spaces. The others are of the same shape."""
    answers = sorted({row["answer"] for row in math_500()})
    for answer in answers:
        larger = answer.replace(r"\frac", r"\dfrac")
        gold, guess = shapes(answer, rf"$\,{larger}\,$.")
        assert grader.grade(answer, answer) == "right"
        assert grader.workers[0].compare(asdict(gold), asdict(guess), SECONDS) == "right", answer
    kinds = {answer: shapes(answer, answer)[0].kind for answer in answers}
    pairs = [(a, b) for a in answers for b in answers if a != b and kinds[a] == kinds[b] and not (a + b).isdigit()]
    for reference, answer in random.Random(0).sample(pairs, 500):
        equal = {reference, answer} in ({"1,-2", "-2,1"}, {"2k+2", "2k + 2"})
        assert grader.grade(reference, answer) == ("right" if equal else "wrong"), (reference, answer)


def math_500() -> list[dict[str, str]]:
    if not MATH_500.is_file():
        pytest.skip(f"{MATH_500} is not there: benchmark data stands beside the checkout (FULLBAND_SHARED)")
    return [json.loads(line) for line in MATH_500.read_text(encoding="utf-8").splitlines()]


def test_equal_strings_are_right_whatever_they_are(grader):
    """Math-verify can read none of these."""
    for text in (r"\begin{align*} x", "{{{", r"\text{no }\frac", "&&"):
        assert grader.grade(text, f" {text} ") == "right"


@pytest.mark.parametrize("answer", ["9^{9^{9^{9^{9}}}}", "(((" * 400, r"\frac{" * 300 + "1"])
def test_what_takes_for_ever_is_undecided_and_the_next_is_graded(grader, answer):
    grader.seconds = 2.0
    try:
        grader.grade("2", "1+1")  # a running process
        started = time.monotonic()
        verdict = grader.grade("2", answer)
        assert verdict in ("undecided", "wrong") and time.monotonic() - started < 4
        if answer.startswith("9"):
            assert verdict == "undecided"
        grader.seconds = SECONDS
        assert grader.grade("2", "1+1") == "right"
    finally:
        grader.seconds = SECONDS


def test_an_unreadable_reference_is_undecided(grader):
    assert grader.grade("&&", "5") == "undecided"


def test_many_answers_in_their_order(grader):
    assert grader.grade_all(r"\frac{1}{2}", ["1/2", "3", "0.5", None]) == ["right", "wrong", "right", "wrong"]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"So \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} or rather \boxed{\text{a } \{2\}}", r"\text{a } \{2\}"),
        (r"\fbox{3}", "3"),
        (r"\boxed {7}", "7"),
        (r"\boxed 5", "5"),
        (r"\boxed 12.", "12"),
        (r"\boxed\frac{1}{2}", r"\frac{1}{2}"),
        (r"\boxed{a \\{b}\\ c}", r"a \\{b}\\ c"),
        (r"\boxed{\left\{1,2\right\}}", r"\left\{1,2\right\}"),
        (r"\boxed{\boxed{4}}", r"\boxed{4}"),
        (r"$\boxed{3}$, $\boxed{5}$ and $\boxed{7}$", "3, 5, 7"),
        (r"\boxed{3}, \boxed{5}, \boxed{7}", "3, 5, 7"),
        (r"\(\boxed{3}\) or \(\boxed{5}\)", "3, 5"),
        (r"$x=\boxed{3}$, $y=\boxed{5}$", "3, 5"),
        (r"First \boxed{1}. Then \boxed{2}", "2"),
        (r"\boxed{2}, as said: \boxed{2}", "2"),
        (r"\boxed{}", None),
        (r"\boxed{\frac{1}{2", None),
        (r"<think>\boxed{5}</think> \boxed{6}", "6"),
        (r"$$\boxed{8}$$", "8"),
        ("Final Answer: The final answer is $5$. I hope it is correct.", "5"),
        ("The final answer is 3.5. I hope it is correct.\n\nProblem:\nThe final answer is $6$. I hope it is correct.", "6"),
        ("The final answer is 3.5. Because I checked.", "3.5"),
        ("The final answer is **73**.", "73"),
        ("**The final answer is: 73**", "73"),
        ("The final answer is $$8$$. I hope it is correct.", "8"),
        ("The final answer is:\n\\[\n5\n\\]", "5"),
        ("no idea", None),
    ],
)
def test_answers_are_found(text, answer):
    assert math_answer(text) == answer


PIECES = [
    " ", "\n", "$", "{", "}", "\\", "\\{", "final answer is ", "\\boxed", "\\boxed{", "\\boxed ", "\\boxed{1},", "\\boxed{1} and ", "1 ",
    "1,", "1 2/3 ", "\\frac", "\\text{", "*", "a ", "(", "[", "\\overline{", "0.3", "^", "\\pm ", "√(", "x\\in ", "x=", "\\approx ",
    "\\cup ", "<", "\\sin60°", "{1\\over", "\\left(", "</think>", "final answer is \\[", "é", "１",
]  # fmt: skip


def test_finding_an_answer_takes_linear_time():
    """Twice the text takes less than three times as long, or a moment. What took long once is measured again: a busy machine only adds."""
    for piece in PIECES:
        for before in ("\\boxed{", "final answer is", ""):
            short, long = (before + piece * (size // len(piece)) for size in (20_000, 40_000))
            if _seconds(math_answer, long) > 0.05:
                half, whole = (min(_seconds(math_answer, text) for _ in range(5)) for text in (short, long))
                assert whole < max(3 * half, 0.1), piece


def test_the_shape_of_an_answer_takes_a_moment():
    for piece in PIECES:
        text = piece * (LONGEST // len(piece))
        assert _seconds(lambda answer: shapes(r"\frac12", answer), text) < 3, piece


def _seconds(function, text: str) -> float:  # type: ignore[no-untyped-def]
    """Of processor time, without the collection of garbage: that goes through whatever other tests have left."""
    gc.disable()
    try:
        started = time.process_time()
        function(text)
        return time.process_time() - started
    finally:
        gc.enable()


def test_an_answer_of_pages_is_undecided(grader):
    assert grader.grade("5", "5" + " + 0" * LONGEST) == "undecided"


def test_same_text_is_not_too_generous():
    assert same_text(r"\left(1,\,2\right)", "(1,2)")
    assert not same_text("12", "1 3") and not same_text("-1", "1") and not same_text(r"\frac{1}{2}", r"\frac{2}{1}")


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("9 * 2 = 18\n#### 18", True, True),
        ("#### 18.", True, True),
        ("#### 18\n\nQuestion: another\n#### 5", True, False),
        ("The answer is $18.", False, True),
        ("It is 1,8", False, True),  # a separator anywhere, as in lm-eval
        ("#### 18.0", False, False),  # compared as text
        ("#### 19", False, False),
        ("18 or 19", False, False),
        ("####18", False, True),  # strict wants the space
        ("-18", False, False),
        ("none", False, False),
        ("", False, False),
    ],
)
def test_gsm8k(text, strict, flexible):
    grade = grade_gsm8k(SOLUTION, text)
    assert (grade.strict, grade.flexible) == (strict, flexible)


CHAT_VALUES = {
    "$29.00": 29, "It is 18.0": 18,
    r"\boxed{18}, which is 9*2 and 3 more than 15": 18, "The final answer is $18$. It is 3 more than 15.": 18, r"\boxed{\$1{,}234}": 1234,
    "$1,234.00": 1234, "−18": -18, "18...": 18, "so 18 and so on...": 18, "#### 18\nfor 9*2=18 and 3 eggs": 18,
    "-$18.5": -18.5, "$-18": -18, "7-18": 18, "10–15": 15, "**18**": 18, "#### $1,234": 1234, "#### **18**": 18, "#### -18": -18, ".5": 0.5,
    "１８": 18, "#### 1. Add\nit is 7": 7, "$ 18": 18, "x=-18": -18, r"\boxed{18}": 18, r"\$18": 18, "1{,}234": 1234, "(-3)": -3,
    "#### 6 * 7 = 42": 42, "#### $5 - $47 = -$42 a day": -42, "#### 1/2": 0.5, r"\boxed{\frac{1}{2}}": 0.5, "42 m^2": 42, "42 cm²": 42,
    "42½": 42.5, r"\boxed{42\text{ cm}^{2}}": 42, r"\boxed{1\,234}": 1234, "1\u202f234 g": 1234, "#### 42/7 = 6": 6, "#### 42 = 12*3.5": 42,
    "#### 1/0": None,
    "<think>#### 5</think>It is 18.": 18, "####18": 18, "...": None, "none": None, "-": None,
}  # fmt: skip


@pytest.mark.parametrize("text", CHAT_VALUES)
def test_gsm8k_in_chat_is_the_value(text):
    assert chat_value(text) == CHAT_VALUES[text]


@pytest.mark.parametrize(
    "text", ["1" * 100_000, "1," * 50_000, "$" * 100_000, "- " * 50_000, "####" + " " * 100_000, "1." * 50_000, "####" + "= " * 50_000]
)
def test_gsm8k_in_chat_takes_linear_time(text):
    started = time.monotonic()
    assert not grade_gsm8k(SOLUTION, text).chat
    assert time.monotonic() - started < 2


def test_gsm8k_references():
    assert reference_answer("x\n#### 1,234") == "1234" and reference_answer("#### -5") == "-5"
    with pytest.raises(ValueError, match="no '#### number'"):
        reference_answer("the answer is 5")


def test_gsm8k_is_lm_evals_filters():
    """The same texts through lm-eval's own filters and metric."""
    pytest.importorskip("lm_eval")
    from lm_eval.filters.extraction import RegexFilter

    strict = RegexFilter(regex_pattern=r"#### (\-?[0-9\.\,]+)")
    flexible = RegexFilter(regex_pattern=r"(-?[$0-9.,]{2,})|(-?[0-9]+)", group_select=-1)
    texts = ["#### 18", "#### 18.", "so $18.00", "it is 7 or -18", "1,8", "x 18.", "####18", "none", "$ 18", "#### -18, 5", "18 apples."]
    for text in texts:
        for which, found in (("strict", strict), ("flexible", flexible)):
            (said,) = found.apply([[text]], [{}])[0]
            plain = said.replace(",", "").replace("$", "").removesuffix(".")
            assert getattr(grade_gsm8k(SOLUTION, text), which) == (plain == "18"), (text, which)


def test_refusals():
    with pytest.raises(ValueError, match="at least 1 worker"):
        MathGrader(workers=0)
    with pytest.raises(ValueError, match="above 0 seconds"):
        MathGrader(seconds=0)
