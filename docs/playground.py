"""The pictures of the playground: start a server, then

python docs/playground.py http://127.0.0.1:8000 docs/playground.png     of a text model: fullband serve runs/tiny-text
python docs/playground.py http://127.0.0.1:8000 docs/game.png           of the quickstart's: fullband serve runs/quickstart/fullband
"""

from __future__ import annotations

import shutil
import sys
from typing import Any

WORD = "3 3 1 2 4 2 0 5 5 0 1 2 3 3 4 2 4 5 4 5 3 1 4 1 4 0 2 3 4 0 3 1"


def take(address: str, picture: str) -> None:
    """What a person sees who asked for what the carried state changes, or typed a word of 32 permutations."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 800}, color_scheme="light")
        page.goto(address)
        page.wait_for_load_state("networkidle")
        last = _game(page) if page.is_visible("#game") else _text(page)
        page.evaluate("scrollTo(0, 0)")
        box = page.query_selector(last).bounding_box()
        height = box["y"] + box["height"] + 4
        page.screenshot(path=picture, full_page=True, clip={"x": 0, "y": 0, "width": 1100, "height": height})
        browser.close()


def _game(page: Any) -> str:
    page.fill("#text", WORD)
    _look(page)
    return "#map"


def _text(page: Any) -> str:
    for place, value in {"#prompt": "The state of the", "#tokens": "160", "#temperature": "0.7", "#seed": "3"}.items():
        page.fill(place, value)
    page.check("[value=carried]")
    page.wait_for_selector("#stop:disabled")
    page.click("#go")
    page.wait_for_selector("#stop:disabled")
    _look(page)
    return "#map"


def _look(page: Any) -> None:
    with page.expect_response("**/fullband/passes"):
        page.click("#look")
    page.wait_for_timeout(500)  # in which it is drawn


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    take(sys.argv[1], sys.argv[2])
