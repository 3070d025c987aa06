"""The page in a real browser: three modes side by side, what the carried state changes, a text by feedback passes, the product game, and
the same page before vLLM; with a keyboard, on a phone, and where something fails."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fullband.config import TaskSource, TrunkConfig
from fullband.data.chat_template import ChatTemplate
from fullband.data.tasks import build_task, permutations_of
from fullband.data.tokenizers import ByteTokenizer, TaskTokenizer
from fullband.decode import generate_texts
from fullband.decode.prefill import prefill_reported
from fullband.decode.prompts import align_prompts
from fullband.model import FullBandModel
from fullband.serve.engine import LocalEngine
from fullband.serve.page import playground
from fullband.serve.scheduler import Scheduler
from fullband.serve.views import CarriedRequest, ViewRequest, by_passes, carried

BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
MODES = ("standard", "soft", "fused")
SIZES = [(1100, "light"), (360, "dark"), (360, "light"), (1100, "dark")]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    if BROWSER is None:
        pytest.skip("needs Chromium")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens an address; at the end nothing has come from elsewhere, no script has failed, and nothing is wider than the window."""
    pages = []

    def opened(address: str, width: int = 1100, scheme: str = "light", routes: Callable[[Any], None] | None = None) -> Any:
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        errors: list[str] = []
        asked: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on(
            "console",
            lambda said: errors.append(said.text) if said.type == "error" and "Failed to load resource" not in said.text else None,
        )
        page.on("request", lambda request: asked.append(request.url))
        pages.append((page, address, errors, asked))
        if routes is not None:
            page.route("**/*", routes)
        page.goto(address)
        until(page, "server !== null || document.querySelector('#server.error') !== null")
        return page

    yield opened
    for page, address, errors, asked in pages:
        assert not errors
        assert all(url.startswith((address, "data:")) for url in asked), "nothing comes from elsewhere"
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "nothing is wider than the window"
        page.close()


def until(page: Any, condition: str, seconds: float = 60) -> None:
    """The page's own rules forbid it to evaluate text, which Playwright's waiting does."""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, f"{condition}: {page.inner_text('body')}"
        time.sleep(0.02)


def generate(page: Any, prompt: str = "once upon", tokens: int = 12, **fields: str) -> None:
    page.fill("#prompt", prompt)
    page.fill("#tokens", str(tokens))
    for name, value in fields.items():
        page.select_option(f"#{name}", value)
    page.click("#go")
    page.wait_for_selector("#stop:disabled")


def texts(page: Any, what: str) -> list[str]:
    return [found.text_content() for found in page.query_selector_all(f"#modes {what}")]


def colors(page: Any, mode: str) -> list[str]:
    shades: list[str] = page.evaluate(f"[...panels.{mode}.text.children].map(span => getComputedStyle(span).backgroundColor)")
    return shades


@pytest.mark.parametrize(("width", "scheme"), SIZES)
def test_three_modes_side_by_side(
    served_model: FullBandModel, serving: Callable[..., str], open_page: Callable[..., Any], width: int, scheme: str
) -> None:
    page = open_page(serving(), width, scheme)
    generate(page)
    expected = {mode: generate_texts(served_model, ByteTokenizer(), ["once upon"], mode, max_new_tokens=12)[0] for mode in MODES}
    assert texts(page, "pre") == [expected[mode].text for mode in MODES]
    for mode in MODES:
        places = [place for place in range(12) if expected[mode].tokens[place] != expected["standard"].tokens[place]]
        marked = page.evaluate(f"[...panels.{mode}.text.children].flatMap((span, i) => span.classList.contains('differs') ? [i] : [])")
        assert marked == places[:1]
        note = page.evaluate(f"panels.{mode}.note.textContent")
        assert (f"differs from Standard at token {places[0]}" in note) if places else ("differs" not in note)
        assert f"{9 * (2 if mode == 'fused' else 1) + 11} positions computed" in note
    assert all(color.startswith("rgba(179, 102, 27") for color in colors(page, "standard"))
    page.check("[value=carried]")
    page.wait_for_selector("#stop:disabled")
    assert "Standard carries no state" in page.inner_text("#modes article:first-child") and set(colors(page, "standard")) == {
        "rgba(0, 0, 0, 0)"
    }
    for mode in ("soft", "fused"):
        answer = expected[mode].tokens
        found = carried(served_model, ByteTokenizer(), list(b"once upon"), answer, CarriedRequest(answer=answer, mode=mode))
        for place, (one, other, color) in enumerate(zip(found["with"], found["without"], colors(page, mode), strict=True)):
            more = one > other
            assert color.startswith("rgba(30, 110, 190" if more else "rgba(179, 102, 27") or abs(one - other) < 0.02, (mode, place, color)
    page.focus("#modes article:nth-child(2) pre")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    detail = page.evaluate("panels.soft.detail.textContent")
    assert detail.startswith("token 1, ") and "without the carried state" in detail


def test_a_chat_and_what_the_carried_state_changes_in_it(
    served_model: FullBandModel, serving: Callable[..., str], open_page: Callable[..., Any]
) -> None:
    template = ChatTemplate("{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}")
    page = open_page(serving(template=template))
    page.check("#chat")
    generate(page, tokens=8)
    answers = [generate_texts(served_model, ByteTokenizer(), ["<user>once upon"], mode, max_new_tokens=8)[0] for mode in MODES]
    assert texts(page, "pre") == [answer.text for answer in answers]
    page.check("[value=carried]")
    page.wait_for_selector("#stop:disabled")
    asked = CarriedRequest(answer=answers[2].tokens, mode="fused")
    found = carried(served_model, ByteTokenizer(), list(b"<user>once upon"), answers[2].tokens, asked)
    assert page.evaluate("panels.fused.tokens.map(token => token.carried.without)") == pytest.approx(found["without"], abs=1e-5)


@pytest.mark.parametrize("passes", ["1", "4", "exact", "converged"])
def test_what_each_mode_cost(served_model: FullBandModel, serving: Callable[..., str], open_page: Callable[..., Any], passes: str) -> None:
    page = open_page(serving())
    generate(page, tokens=5, passes=passes)
    report = prefill_reported(served_model, align_prompts(served_model.trunk, [list(b"once upon")]), "converged")[1]
    prompt = {"1": 18, "4": 45, "exact": 9, "converged": report.executed_positions if report else 0}[passes]
    for mode, positions in zip(MODES, (9, 9, prompt), strict=True):
        assert page.evaluate(f"panels.{mode}.note.textContent").startswith(f"{positions + 4} positions computed: prompt ")


def test_what_was_kept_is_not_counted_again(
    served_model: FullBandModel, serving: Callable[..., str], open_page: Callable[..., Any]
) -> None:
    own = Scheduler(LocalEngine(served_model, chunk=16, prefix_bytes=2**24), ByteTokenizer(), most_rows=4)
    try:
        page = open_page(serving(scheduler=own))
        for expected in ("80 positions computed: prompt 40 × 2 passes", "48 positions computed: prompt (40 − 16 kept from before) × 2"):
            generate(page, "a" * 16 + expected[:1] * 24, tokens=1)
            assert page.evaluate("panels.fused.note.textContent").startswith(expected)
    finally:
        own.close(timeout=20)


@pytest.mark.parametrize(("width", "scheme"), SIZES)
def test_a_text_by_feedback_passes(
    served_model: FullBandModel, serving: Callable[..., str], open_page: Callable[..., Any], width: int, scheme: str
) -> None:
    page = open_page(serving(), width, scheme)
    page.fill("#text", "hello thére <b>")
    page.fill("#most", "3")
    page.click("#look")
    until(page, "view !== null")
    assert page.inner_text("#shown").startswith("hello th") and "token_id" not in page.inner_text("#shown")
    assert page.inner_text("#shown").endswith("<b>") and page.query_selector("#shown b") is None
    assert len(page.query_selector_all("#shown .half")) == 2, "two bytes of one character"
    rows = by_passes(served_model, ByteTokenizer(), ViewRequest(text="hello thére <b>", feedback_passes=3))["rows"]
    means = [sum(row["loss"][1:]) / (len(row["loss"]) - 1) for row in rows]
    page.focus("#slider")
    page.keyboard.press("Home")
    for row, mean in zip(rows, means, strict=True):
        assert page.inner_text("#which") == str(row["feedback_passes"])
        shown, plain, exact = re.findall(r"\d+\.\d{4}", page.inner_text("#mean"))
        assert (float(shown), float(plain), float(exact)) == pytest.approx((mean, means[0], means[-1]), abs=1e-4)
        page.keyboard.press("ArrowRight")
    assert page.get_attribute("#map", "aria-label") == ", ".join(
        f"{row['feedback_passes']}: {mean:.3f}" for row, mean in zip(rows, means, strict=True)
    )
    height = page.query_selector("#map").bounding_box()["height"]
    page.click("#map", position={"x": 150, "y": height * 0.3})  # in the second of five rows
    assert page.inner_text("#which") == "1"
    drawn = "id => { const c = $(id); return new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size }"
    assert page.evaluate(drawn, "map") > 10 and page.evaluate(drawn, "settling") > 10
    before = page.evaluate("$('map').toDataURL()")
    page.check("#diff")
    assert page.evaluate("$('map').toDataURL()") != before and "less that of exact" in page.inner_text("#map-title")
    page.fill("#text", "a" * 500)
    page.click("#look")
    page.wait_for_selector("#mean.error")
    assert "context of 96" in page.inner_text("#mean")


@pytest.mark.parametrize(("width", "scheme"), SIZES[:2])
def test_the_product_game(serving: Callable[..., str], open_page: Callable[..., Any], width: int, scheme: str) -> None:
    task = build_task(TaskSource())
    torch.manual_seed(0)
    model = FullBandModel(
        TrunkConfig(vocab_size=task.vocab_size, width=32, layers=1, heads=2, kv_heads=1, glu_width=32, context=64, window=8)
    ).eval()
    tokenizer = TaskTokenizer(task.name, task.names)
    own = Scheduler(LocalEngine(model), tokenizer, most_rows=4)
    try:
        page = open_page(serving(scheduler=own), width, scheme)
        until(page, "view !== null")  # a word of its own to begin with
        assert "product game" in page.inner_text("#given-title")
        page.fill("#length", "40")
        page.click("#random")
        until(page, "view.tokens.length === 40")
        word = page.input_value("#text")
        assert len(word.split()) == 40 and set(word.split()) <= set(task.names)
        found = by_passes(model, tokenizer, ViewRequest(text=word, feedback_passes=16))
        for place in (0, 4, 17):
            page.eval_on_selector("#slider", f"slider => {{ slider.value = {place}; slider.dispatchEvent(new Event('input')) }}")
            answers = found["rows"][place]["answers"]
            right = [answer == expected for answer, expected in zip(answers, found["right"], strict=True)]
            steps = page.query_selector_all("#steps li")
            assert [step.get_attribute("class") for step in steps] == ["right" if good else "wrong" for good in right]
            assert page.inner_text("#mean").startswith(f"{sum(right)} of 40 answers right")
            assert f"the first wrong one is at step {right.index(False)}" in page.inner_text("#mean")
            for step, answer, good in zip(steps, answers, right, strict=True):
                lie: list[str] = [""] * 3
                for letter, to in zip("ABC", permutations_of("S3")[int(answer)], strict=True):
                    lie[to] = letter
                assert step.text_content().startswith("".join(lie) + (" ✓" if good else " ✗"))
        page.fill("#text", "")
        page.click("#moves button:nth-child(4)")
        until(page, "view.tokens.length === 1")
        page.click("#moves button:nth-child(2)")
        until(page, "view.tokens.length === 2")
        assert page.input_value("#text") == "3 1"
        page.click("text=undo")
        assert page.input_value("#text") == "3"
        page.fill("#text", "3 x")
        page.click("#look")
        page.wait_for_selector("#mean.error")
        assert "'x' is not a token of task:group-word S3" in page.inner_text("#mean")
    finally:
        own.close(timeout=20)


def as_vllm(
    seen: list[dict[str, Any]], chat: bool = False, about: dict[str, Any] | None = None, status: int = 200
) -> Callable[[Any], None]:
    """Answers as vLLM does: several tokens a chunk, its own form of a stop, no states."""
    told = {"engine": "vllm", "model": "m", "chat": chat, "mode": "soft", "states": False, "task": None} if about is None else about

    def chunks() -> Iterator[dict[str, Any]]:
        first = {"prompt_token_ids": [1, 2, 3]}
        for text, words, ids, reason in (
            ("<script>", ["<scr", "ipt>"], [4, 5], None),
            ("", [""], [6], None),  # half a character
            ("é", ["é"], [7], None),
            ("", ["<|end|>"], [8], "stop"),
        ):
            logprobs = {"tokens": words, "token_logprobs": [-0.5] * len(words)}
            yield {"choices": [{"index": 0, "text": text, "logprobs": logprobs, "token_ids": ids, "finish_reason": reason, **first}]}
            first = {}
        yield {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}

    def answer(route: Any) -> None:
        path = route.request.url.removeprefix("http://vllm.test")
        if path == "/":
            route.fulfill(body=playground(), content_type="text/html")
        elif path == "/fullband/about":
            route.fulfill(json=told) if told else route.fulfill(status=404, json={"detail": "Not Found"})
        elif path == "/v1/models":
            route.fulfill(json={"data": [{"id": "m"}]})
        elif status != 200:
            route.fulfill(status=status, body="<html>an error</html>", content_type="text/html")
        elif path == "/v1/completions":
            seen.append(route.request.post_data_json)
            stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks()) + "data: [DONE]\n\n"
            route.fulfill(body=stream, content_type="text/event-stream; charset=utf-8")
        else:
            route.fulfill(status=500, body=path)

    return answer


@pytest.mark.parametrize("about", [None, {}], ids=["middleware", "proxy"])
def test_before_vllm(open_page: Callable[..., Any], about: dict[str, Any] | None) -> None:
    seen: list[dict[str, Any]] = []
    page = open_page("http://vllm.test/", 360, routes=as_vllm(seen, about=about))
    assert "without the model's states" in page.inner_text("#server").lower() and "own" in page.inner_text("#server")
    assert not page.is_visible("#given") and not page.is_visible("#shades")
    assert page.locator("#passes option").all_text_contents() == ["1", "2", "4"]
    generate(page, passes="2")
    assert {body["vllm_xargs"]["mode"] for body in seen} == set(MODES)
    for body in seen:
        assert "mode" not in body and "feedback_passes" not in body and body["model"] == "m"
        assert body["vllm_xargs"].get("feedback_passes") == (2 if body["vllm_xargs"]["mode"] == "fused" else None)
    assert texts(page, "pre") == ["<script>é"] * 3 and page.query_selector("#modes script") is None
    classes = page.evaluate("[...panels.soft.text.children].map(span => span.className)")
    assert classes == ["", "", "half", "", "end"]
    assert page.evaluate("panels.fused.note.textContent").startswith("13 positions computed: prompt 3 × 3 passes + answer 4; 5 new tokens")
    assert "same as Standard" in page.evaluate("panels.soft.note.textContent")


def test_what_fails_is_said_in_a_line(serving: Callable[..., str], open_page: Callable[..., Any]) -> None:
    page = open_page("http://vllm.test/", routes=as_vllm([], status=502))
    generate(page)
    assert all(note.startswith("502") and "<" not in note for note in texts(page, "article p:last-child"))
    page = open_page(serving())
    generate(page, tokens=500)  # more than the context has room for
    assert all("exceeds the model's context" in note for note in texts(page, ".error"))
    page.route("**/v1/completions", lambda route: route.abort())
    generate(page)
    assert texts(page, ".error") == ["the server does not answer"] * 3


def test_a_key_is_asked_for(serving: Callable[..., str], open_page: Callable[..., Any]) -> None:
    page = open_page(serving(key="secret"))
    assert "a key is needed" in page.inner_text("#server") and page.is_visible("#locked")
    page.fill("#key", "secret")
    page.keyboard.press("Enter")
    until(page, "server !== null")
    generate(page, tokens=3)
    assert all("positions computed" in note for note in texts(page, "article p:last-child"))


def test_stop_cancels(
    scheduler: Scheduler, serving: Callable[..., str], open_page: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = scheduler.engine.step
    monkeypatch.setattr(scheduler.engine, "step", lambda *given: (time.sleep(0.05), step(*given))[1])
    page = open_page(serving())
    page.fill("#tokens", "80")
    page.click("#go")
    until(page, "MODES.every(mode => panels[mode].tokens.length > 2)")
    page.click("#stop")
    page.wait_for_selector("#stop:disabled")
    assert texts(page, "article p:last-child") == ["stopped"] * 3 and all(0 < len(text) < 80 for text in texts(page, "pre"))
    end = time.monotonic() + 20
    while scheduler.running and time.monotonic() < end:
        time.sleep(0.05)
    assert scheduler.running == 0 and scheduler.counters.cancelled == 3
