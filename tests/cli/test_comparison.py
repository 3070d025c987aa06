"""The three modes side by side: the same numbers in the terminal, as JSON and on the page."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from cli.commands import Trained, fullband
from fullband.cli.comparison import marked, split_at
from fullband.cli.comparison_page import page
from fullband.cli.completions import settings_json
from fullband.decode import GenerateOptions, TextCompletion, resolve_mode
from fullband.decode.compare_modes import MODES, ModeAnswers, ModeComparison

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Balance(HTMLParser):
    """Fails on a tag that is closed out of order; collects what elements load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def answer_of(tokens: list[int], pieces: list[str]) -> TextCompletion:
    return TextCompletion("".join(pieces), tokens, "stop", pieces)


def comparison(*texts: str) -> ModeComparison:
    """One prompt; a token a character; the ids are code points."""
    answers = [answer_of([ord(c) for c in text], list(text)) for text in texts]
    by_mode = {mode: ModeAnswers(resolve_mode(mode), [a], 0.1, 0.2, 9) for mode, a in zip(MODES, answers, strict=True)}
    return ModeComparison(["a <prompt>"], [10], by_mode)


def test_where_answers_part() -> None:
    found = comparison("abcd", "abxd", "ab")
    assert [found.first_difference(0, mode) for mode in MODES] == [None, 2, 2]
    assert found.parting(0) == 2
    assert comparison("ab", "ab", "abc").first_difference(0, "fused") == 2
    assert comparison("ab", "ab", "ab").parting(0) is None
    assert [found.positions_read(mode) for mode in MODES] == [10, 10, 20]


def test_the_mark_survives_without_colours() -> None:
    answer = answer_of([1, 2, 3], ["a", "\n", "\x1bc"])
    assert marked(answer, 1).plain == "a»\\n«\n\ufffdc"
    assert marked(answer, 3).plain == "a\n\ufffdc»end of text«"
    assert marked(answer, None).plain == "a\n\ufffdc"


def test_a_part_of_a_character_is_marked_as_the_character() -> None:
    assert split_at(answer_of([1, 2, 3, 4], ["a", "", "ü", "b"]), 1) == ("a", "ü", "b")


@pytest.mark.parametrize("passes", [[], ["--feedback-passes", "exact"], ["--feedback-passes", "converged"]])
def test_json_agrees_with_generate(text_run: Trained, passes: list[str]) -> None:
    options = ["--max-new-tokens", "10", "--json"]
    found = fullband("generate", text_run.folder, "the quick", "--compare", *passes, *options).json
    assert list(found["modes"]) == list(MODES)
    for mode in MODES:
        own = passes if mode == "fused" else []
        (completion,) = fullband("generate", text_run.folder, "the quick", "--mode", mode, *own, *options).json["completions"]
        answer = found["prompts"][0]["answers"][mode]
        assert (answer["text"], answer["tokens"]) == (completion["text"], completion["tokens"])
    soft = found["prompts"][0]["answers"]["soft"]["first_difference"]
    assert soft is None or soft > 0  # law 6: the first token of Soft is Standard's
    assert found["modes"]["fused"]["positions_read"] == {"exact": 9, "converged": None}.get("".join(passes[1:]), 18)


def test_in_the_terminal(text_run: Trained, tmp_path: Path) -> None:
    one = fullband("generate", text_run.folder, "the quick", "--compare", "--max-new-tokens", "10")
    assert one.code == 0 and one.err == ""
    assert (
        "The modes do not cost the same: fused takes one feedback pass over the prompt (18 positions computed, by the others 9)"
        in " ".join(one.out.split())
    )
    (tmp_path / "p.txt").write_text("the quick\nbrown\n")
    several = fullband("generate", text_run.folder, "--prompts", tmp_path / "p.txt", "--compare", "--max-new-tokens", "10")
    assert "Length of 2 answers in tokens" in several.out and "median tokens" in several.out


def test_the_page_of_a_set_of_prompts(text_run: Trained, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "the <b>quick</b> & $brown", "id": "x<y"}\n{"prompt": "fox"}\n')
    html = tmp_path / "modes.html"
    options = ["--compare", "--max-new-tokens", "10", "--html", html, "--json"]
    found = fullband("generate", text_run.folder, "--prompts", tmp_path / "p.jsonl", *options)
    assert found.code == 0 and f"{html}: written" in found.err.replace("\n", "")
    text = html.read_text(encoding="utf-8")
    check_page(text)
    assert "the &lt;b&gt;quick&lt;/b&gt; &amp; $brown" in text and "x&lt;y" in text
    assert text.count('<section class="trace') == 6


def test_the_page_marks_the_first_differing_token() -> None:
    found = comparison("abcd", "abxd", "ab")
    text = page(found, described(found))
    check_page(text)
    assert '<span class="same">ab</span><mark>c</mark>d' in text
    assert '<span class="same">ab</span><mark>x</mark>d' in text
    assert '<span class="same">ab</span><mark><small>end of text</small></mark>' in text
    assert "Soft and Fused differ from Standard" in text
    same = comparison("ab", "ab", "ab")
    assert "Three modes, one answer" in page(same, described(same))


def described(found: ModeComparison) -> dict:
    from fullband.cli.comparison import to_json

    return to_json(found, [1], "model", settings_json(GenerateOptions(mode="fused", max_new_tokens=4), "float32"))


def check_page(text: str) -> None:
    """It holds together and opens offline."""
    parser = Balance()
    parser.feed(text)
    assert parser.open == []
    assert all(load.startswith("#") for load in parser.loads)
    assert not re.search(r"https?://|@import|url\(|fetch\(", text)
    assert not re.search(r"\$(stylesheet|headline|light|dark|colours|traces|index)", text)
