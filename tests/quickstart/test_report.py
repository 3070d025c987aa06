"""The page opens offline, holds together, and says what it must."""

from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser

import pytest

from fullband.plots.chart import nice_ticks
from fullband.quickstart import prose

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
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "xlink:href")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="session")
def page(miniature) -> str:
    return (miniature.output / "report.html").read_text(encoding="utf-8")


def test_nothing_is_loaded_from_anywhere(page: str) -> None:
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    assert parser.loads == []
    assert not re.search(r"https?://|@import|url\((?!#)|fetch\(|XMLHttpRequest", page)


def test_no_placeholder_is_left(page: str) -> None:
    assert not re.search(r"\$\w", page)


@pytest.mark.parametrize(
    "words",
    [
        "prefix mixin off",
        "token-equivalent compute",
        "switch-on shock",
        "training length",
        "chance",
        "positions executed",
        "--seed 3",
        "torch",
    ],
)
def test_it_says(words: str, page: str) -> None:
    assert words in page


def test_charts_carry_their_values(page: str, miniature) -> None:
    charts = [json.loads(html.unescape(data)) for data in re.findall(r"data-chart='([^']*)'", page)]
    assert len(charts) == 8  # accuracy, loss, gradient norm and learning rates, each for a desk and for a phone
    accuracy = charts[0]["lines"]
    assert [line["key"] for line in accuracy] == list(miniature.result["accuracy"])
    assert accuracy[-1]["y"] == pytest.approx(miniature.result["accuracy_by_position"]["exact"], abs=5e-4)
    assert {line["label"] for line in charts[2]["lines"]} >= {"standard model", "full-band, pass 1 (without feedback)", "full-band, pass 2"}


def test_the_headline_claims_only_what_was_found() -> None:
    def result(exact: float, standard: float) -> dict:
        return {"accuracy": {"exact": {"32": exact}, "standard": {"32": standard}}, "task": {"length": 16}}

    assert "guesses" in prose.headline(result(0.9, 0.17), 32)
    assert "guesses" not in prose.headline(result(0.6, 0.17), 32)
    assert "guesses" not in prose.headline(result(0.9, 0.7), 32)


def test_a_model_without_crossover_or_feedback_is_described() -> None:
    never = {"switch_on_step": 5, "switch_on_shock": 1.25, "crossover_step": None}
    assert "1.25 nats worse" in prose.milestones(never)
    assert "has not fallen below" in prose.milestones(never)
    assert "never switched on" in prose.milestones(dict.fromkeys(never))


@pytest.mark.parametrize(("high", "ticks"), [(1.9, [0, 0.5, 1, 1.5]), (2.98, [0, 1, 2]), (0.004, [0, 0.001, 0.002, 0.003, 0.004])])
def test_ticks_are_round(high: float, ticks: list[float]) -> None:
    assert nice_ticks(high) == pytest.approx(ticks)
