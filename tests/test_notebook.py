"""The example notebook runs from top to bottom and shows what it says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

NOTEBOOK = Path(__file__).parent.parent / "examples" / "parity.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def test_it_is_kept_without_outputs() -> None:
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in CELLS if cell["cell_type"] == "code")
    pages = re.findall(r"\]\(\.\./([^)]+)\)", "".join(line for cell in CELLS for line in cell["source"]))
    assert pages and all((NOTEBOOK.parent.parent / page).is_file() for page in pages)


@pytest.mark.slow
def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    with torch.random.fork_rng():
        for cell in CELLS:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}: {cell['id']}", "exec"), names)
    accuracy = names["accuracy"]
    assert accuracy["full-bandwidth", "exact"][31] > 0.8 and accuracy["standard model", 0][31] < 0.6
    assert abs(names["standard"].token_equivalent - names["fullband"].token_equivalent) <= 32 * 16
    assert (tmp_path / "parity.png").stat().st_size > 10_000
    right = sum(a == b for a, b in zip(names["said"], names["answers"][0].tolist(), strict=True))
    assert right > 48, "the loop by hand is exact evaluation"
