"""Answers of GSM8K and MATH are found and graded right, each within its time limit."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from fullband.evaluate.grading.gsm8k import chat_value, grade_gsm8k, reference_answer
from fullband.evaluate.grading.math_answers import MathGrader
from fullband.evaluate.grading.math_text import LONGEST, by_rule, math_answer, same_text

SOLUTION = "She makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18"
SECONDS = 10.0

# verdict: pairs of reference and answer
PAIRS: dict[str, list[tuple[str, str]]] = {
    "right": [
        # fractions, roots, mixed numbers
        (r"\frac{1}{2}", "0.5"), (r"\frac{1}{2}", "1/2"), (r"\frac{1}{2}", r"\dfrac{2}{4}"), (r"\frac12", r"\frac{1}{2}"),
        (r"-\frac{3}{4}", r"\frac{-3}{4}"), (r"1\frac{1}{2}", r"\frac{3}{2}"), (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
        (r"3\sqrt{13}", r"\sqrt{117}"), (r"11\sqrt2", r"11\sqrt{2}"), (r"\frac{3}{56}", "3/56"), (".5", "0.5"), ("7", "7.0"), ("7", "7."),
        # units, money, separators, degrees, percents
        ("10", r"10\text{ cm}"), (r"10\text{ cm}", "10"), ("12", r"12 \text{ square units}"), (r"90^\circ", "90"), ("45", r"45^{\circ}"),
        (r"\$18.90", "18.90"), ("18.90", r"\$18.9"), ("10,080", "10080"), ("1{,}000", "1000"), (r"50\%", "50"), (r"25\%", r"25 \%"),
        ("17", "$17$"),
        # tuples, lists, sets, intervals
        (r"(3, \frac{\pi}{2})", r"\left( 3, \frac{\pi}{2} \right)"), ("(1,2)", r"\left(1,\frac{4}{2}\right)"), ("1,-2", "-2,1"),
        ("1, 2, 3", r"\{3, 2, 1\}"), (r"3 \pm 2\sqrt{2}", r"3+2\sqrt{2}, 3-2\sqrt{2}"), ("[0,1]", "[0, 1]"),
        (r"(-\infty, 3]", r"(-\infty,3]"), (r"(-\infty, 2) \cup (2, \infty)", r"(-\infty,2)\cup(2,\infty)"), (r"x \in [-2,7]", "[-2,7]"),
        # matrices
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        (r"\begin{pmatrix} 1/2 \\ 3 \end{pmatrix}", r"\begin{pmatrix} 0.5 \\ 3 \end{pmatrix}"),
        (r"\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}", r"\begin{bmatrix} 1 & 0 \\ 0 & 1 \end{bmatrix}"),
        # words
        (r"\text{Evelyn}", "Evelyn"), (r"\text{(C)}", "(C)"), (r"\text{(C)}", "C"),
        (r"\text{June 20}", "June 20"), (r"\text{even}", r"\text{Even}"),
        # expressions
        ("x^2+2x+1", "(x+1)^2"), ("p - q", "-q + p"), ("y = 2x + 3", "y = 3 + 2x"), ("2x+3", "y = 2x+3"), ("x = 5", "5"),
        ("6r^2-4r-24", "-24-4r+6r^2"), (r"2\pi", "6.283185307179586"), ("3+4i", "4i + 3"), ("2516_8", "2516_{8}"), ("2^{10}", "1024"),
        (r"0.\overline{3}", r"\frac{1}{3}"), ("[-2,7]", r"-2 \le x \le 7"), (r"(-2,7]", r"-2 < x \leq 7"), (r"\emptyset", r"\varnothing"),
        ("15", "15 dollars"), (r"2\sqrt{2}", "2^{1.5}"), (r"\frac{1+i}{2}", "0.5+0.5i"), (r"\frac{\sqrt{3}}{2}", r"\sin 60^\circ"),
        ("1011_2", "(1011)_2"), (r"\left(1,2\right)", r"\big(1,2\big)"), (r"\{1,2\}", r"\lbrace 2, 1\rbrace"), ("1500", "1.5e3"),
        ("-5", "–5"), ("-15", "−１５"), ("x_1+x_2", "x_2+x_1"), (r"\text{Tuesday}", r"\text{Tuesday.}"), (r"\frac{5}{4}", "1 1/4"),
        ("-2,1", "1,-2"), ("0.1\\overline{6}", "1/6"), ("3, 5, 7", "7, 5, 3"), ("11,\\! 111,\\! 111,\\! 100", "11111111100"),
        ("10!", "3628800"), (r"\binom{5}{2}", "10"), (r"\log_2 8", "3"), (r"1.5 \times 10^{3}", "1500"),
    ],
    "wrong": [
        (r"\frac{1}{2}", r"\frac{1}{3}"), (r"\frac{1}{2}", "2"), ("0.333", r"\frac{1}{3}"), (r"50\%", "5"), ("17", "71"), ("17", "-17"),
        (r"50\%", "0.5"),  # the rule of MATH: the answer is how many percent
        ("17", "I do not know"), ("17", ""), ("(1,2)", "(2,1)"), ("(1,2)", "(1,2,3)"), ("1, 2", "1, 3"), ("1, 2", "1"),
        ("[0,1]", "(0,1)"), ("[0,1)", "[0,1]"), (r"(-\infty, 3]", r"(-\infty, 3)"),
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}"),
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}"),
        (r"\text{Evelyn}", r"\text{Debra}"), (r"\text{even}", r"\text{odd}"), (r"\text{(C)}", "(B)"), ("x^2+2x+1", "(x-1)^2"),
        ("2x+3", "2x-3"), (r"\pi", "3.14"), ("3+4i", "3-4i"), ("4210_5", "4210_6"), ("4210_5", "4211_5"),
        ("4", "4,4"), ("4,4", "4"), ("4", "4?5"), ("(2,4)", r"\{2,4\}"), (r"\{2,4\}", "(2,4)"), ("1/2004!", "1/2006!"),
        (r"\pm 2021", "2021"), ("2021", r"\pm 2021"), (r"2\frac{2}{3}", "2"), ("2 2/3", "2"), ("2", "2 2/3"), ("(1,2)", "1,2,3"),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def grader() -> Iterator[MathGrader]:
    if os.environ.get("FULLBAND_CI") != "1":
        pytest.importorskip("math_verify")
    with MathGrader(seconds=SECONDS) as grader:
        yield grader


def test_there_are_enough_pairs():
    assert sum(map(len, PAIRS.values())) >= 60


@pytest.mark.parametrize("verdict", PAIRS)
def test_pairs(grader, verdict):
    for reference, answer in PAIRS[verdict]:
        started = time.monotonic()
        assert grader.grade(reference, answer) == verdict, (reference, answer)
        assert time.monotonic() - started < SECONDS + 30  # the start of a process is not on the answer's clock


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
    seen: dict[int, str] = {}
    pairs = [("1", "1"), ("2", "3"), (r"\frac{1}{2}", "0.5"), ("4", None)]
    assert grader.grade_all(pairs, lambda index, verdict: seen.update({index: verdict})) == ["right", "wrong", "right", "wrong"]
    assert seen == {0: "right", 1: "wrong", 2: "right", 3: "wrong"}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"So \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} or rather \boxed{\text{a } \{2\}}", r"\text{a } \{2\}"),
        (r"\fbox{3}", "3"),
        ("Final Answer: The final answer is $5$. I hope it is correct.", "5"),
        ("The final answer is 3.5. I hope it is correct.\n\nProblem:\nThe final answer is $6$. I hope it is correct.", "6"),
        (r"\boxed{\frac{1}{2", None),
        ("no idea", None),
        (r"\boxed {7}", "7"),
        (r"\boxed 5", "5"),
        (r"\boxed{a \\\{ b \\\}}", r"a \\\{ b \\\}"),
        (r"$\boxed{3}$, $\boxed{5}$ and $\boxed{7}$", "3, 5, 7"),
        ("The final answer is **73**.", "73"),
        ("The final answer is: $$8$$", "8"),
        (r"\boxed{1} so \boxed{2}", "2"),
    ],
)
def test_answers_are_found(text, answer):
    assert math_answer(text) == answer


@pytest.mark.parametrize("piece", [" ", "final answer is ", "\\boxed", "\\boxed{", "{", "\\", "\\boxed ", "\\boxed{1},", "1 ", "1,"])
def test_finding_an_answer_takes_linear_time(piece):
    started = time.monotonic()
    math_answer("\\boxed{" + piece * (100_000 // len(piece)))
    math_answer("final answer is" + piece * (100_000 // len(piece)))
    by_rule("1", piece * (LONGEST // len(piece)))
    assert time.monotonic() - started < 3


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
    "$1,234.00": 1234, "−18": -18, "18...": 18, "so 18 and so on...": 18, "#### 18\nfor 9*2=18 and 3 eggs": 18,
    "-$18.5": -18.5, "$-18": -18, "7-18": 18, "10–15": 15, "**18**": 18, "#### $1,234": 1234, "#### **18**": 18, "#### -18": -18, ".5": 0.5,
    "１８": 18, "#### 1. Add\nit is 7": 7, "$ 18": 18, "x=-18": -18, r"\boxed{18}": 18, r"\$18": 18, "1{,}234": 1234, "(-3)": -3,
    "<think>#### 5</think>It is 18.": 18, "####18": 18, "...": None, "none": None, "-": None,
}  # fmt: skip


@pytest.mark.parametrize("text", CHAT_VALUES)
def test_gsm8k_in_chat_is_the_value(text):
    assert chat_value(text) == CHAT_VALUES[text]


@pytest.mark.parametrize("text", ["1" * 100_000, "1," * 50_000, "$" * 100_000, "- " * 50_000, "####" + " " * 100_000, "1." * 50_000])
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
