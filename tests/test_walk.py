"""docs/design.md names the functions that a batch and a prompt go through, in their order."""

import importlib.util
import re
import warnings
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize(("kind", "most"), [("batch", 24), ("prompt", 28)])
def test_the_page_tells_the_way(kind: str, most: int) -> None:
    spec = importlib.util.spec_from_file_location("walk", DOCS / "walk.py")
    assert spec and spec.loader
    walk = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(walk)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [(place.partition(":")[0], function) for place, function in walk.walk_of(kind)]
    written = re.findall(r"^    ([\w/]+\.py) +(\S+)$", (DOCS / "design.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert any(written[start : start + len(found)] == found for start in range(len(written))), found
    assert len(set(found)) == len(found) <= most, "each function is entered once on the way"
