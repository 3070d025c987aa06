"""The page in a real browser: three modes stream side by side, tokens are shaded, the first difference is marked, nothing overflows."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

from fullband.data.tokenizers import ByteTokenizer
from fullband.decode import generate_texts
from fullband.model import FullBandModel

BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1100, "light"), (400, "dark")])
def test_three_modes_side_by_side(served_model: FullBandModel, serving: Callable[..., str], width: int, scheme: str) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    if BROWSER is None:
        pytest.skip("needs Chromium")
    address = serving()
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(address)
        page.fill("#prompt", "once upon")
        page.fill("#tokens", "12")
        page.click("#go")
        page.wait_for_function("[...document.querySelectorAll('#modes .note')].every(note => note.textContent.includes('new tokens'))")
        texts = [box.text_content() for box in page.query_selector_all("#modes pre")]
        marked = [len(box.query_selector_all(".differs")) for box in page.query_selector_all("#modes pre")]
        shaded = page.eval_on_selector("#modes pre span", "span => getComputedStyle(span).backgroundColor")
        overflow = page.evaluate("document.documentElement.scrollWidth > window.innerWidth")
        page.fill("#text", "hello there")
        page.fill("#most", "3")
        page.click("#look")
        page.wait_for_function("document.getElementById('mean').textContent.includes('nats')")
        means = []
        for place in range(5):
            page.eval_on_selector("#slider", f"slider => {{ slider.value = {place}; slider.dispatchEvent(new Event('input')) }}")
            means.append((page.inner_text("#which"), page.inner_text("#mean")))
        page.fill("#tokens", "500")  # more than the context has room for
        page.click("#go")
        page.wait_for_selector("#modes .error")
        refusal = page.inner_text("#modes .note")
        browser.close()
    assert errors == [message for message in errors if "400" in message], errors
    assert all(url.startswith((address, "data:")) for url in asked), "nothing comes from elsewhere"
    for text, mode in zip(texts, ("standard", "soft", "fused"), strict=True):
        assert text == generate_texts(served_model, ByteTokenizer(), ["once upon"], mode, max_new_tokens=12)[0].text
    assert [which for which, _ in means] == ["0", "1", "2", "3", "exact"] and len({mean for _, mean in means}) > 2
    assert marked[0] == 0 and marked[1:] == [1, 1] and shaded.startswith("rgba(179, 102, 27") and not overflow
    assert "exceeds the model's context" in refusal
