"""The public names, for people and for type checkers, and docs/api.md, whose blocks run."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fullband
from fullband.model import FullBandModel
from reference.seam import read

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def test_checkers_see_the_names_that_the_interpreter_has() -> None:
    tree = ast.parse(Path(fullband.__file__).read_text(encoding="utf-8"))
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in checked.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == {name: f"fullband.{place}" for name, place in fullband._PLACES.items()}
    assert fullband.__all__ == sorted(fullband._PLACES) and (Path(fullband.__file__).parent / "py.typed").is_file()


def test_every_name_of_the_page_is_public() -> None:
    imported = {name.strip() for line in re.findall(r"^from fullband import (.*)$", PAGE, re.MULTILINE) for name in line.split(",")}
    assert {"FullBandModel", "train", "multipass_loss", "attach", "generate"} <= imported <= set(fullband.__all__)


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    with torch.random.fork_rng():
        for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
            exec(compile(block, "docs/api.md", "exec"), names)
    said = capsys.readouterr().out
    assert said.count("\n") > 10 and (tmp_path / "counting" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_users_file_is_checked_with_our_types(tmp_path: Path) -> None:
    """Types come from the package itself: a wrong argument is an error, a right one is not."""
    page = 'from fullband import FullBandModel, generate\n\ngenerate(FullBandModel.load("m"), [[1]], max_new_tokens={})\n'
    for given, code in (("3", 0), ('"three"', 1)):
        (tmp_path / "user.py").write_text(page.format(given))
        command = [sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=silent", "--ignore-missing-imports", "user.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"MYPYPATH": str(ROOT / "src")})
        assert done.returncode == code, done.stdout


def model_and_tokens(isometric_model: Any) -> tuple[FullBandModel, torch.Tensor]:
    return isometric_model(), torch.randint(23, (3, 9))


@pytest.mark.parametrize("passes", [0, 1, 2, "exact"])
@torch.no_grad()
def test_a_prompt_with_a_cache_has_the_states_of_one_without(isometric_model: Any, passes: Any) -> None:
    model, tokens = model_and_tokens(isometric_model)
    plain, kept = model(tokens, passes), model(tokens, passes, use_cache=True)
    torch.testing.assert_close(kept.states, plain.states, rtol=0, atol=1e-10)
    torch.testing.assert_close(kept.logits, plain.logits, rtol=0, atol=1e-10)
    assert plain.cache is None and kept.cache is not None
    assert model(tokens, passes, logits_to_keep=2).logits.shape == (3, 2, 23)


@torch.no_grad()
def test_tokens_after_a_cache_are_as_generated(isometric_model: Any) -> None:
    model, tokens = model_and_tokens(isometric_model)
    for prompt_passes, passes in ((0, 0), ("exact", "exact")):
        whole = read(model, tokens, passes)
        before = model(tokens[:, :4], prompt_passes, use_cache=True)
        at_once = model(tokens[:, 4:], passes, cache=before.cache)
        torch.testing.assert_close(at_once.states, whole[:, 4:], rtol=0, atol=1e-10)
        output, parts = before, []
        for t in range(4, 9):
            output = model(tokens[:, t : t + 1], passes, cache=output.cache, use_cache=True)
            parts.append(output.states)
        torch.testing.assert_close(torch.cat(parts, dim=1), whole[:, 4:], rtol=0, atol=1e-10)
    soft = model(tokens[:, 4:], "exact", cache=model(tokens[:, :4], 0, use_cache=True).cache).states
    assert (soft - whole[:, 4:]).abs().max() > 1e-6


def test_the_default_is_the_configs(isometric_model: Any, tmp_path: Path) -> None:
    model, tokens = model_and_tokens(isometric_model)
    assert torch.equal(model(tokens).states, model(tokens, 0).states)
    model.config = model.config.model_copy(update={"feedback_passes": 2})
    assert torch.equal(model(tokens).states, model(tokens, 2).states)
    model.save(tmp_path / "m")
    assert FullBandModel.load(tmp_path / "m").config.feedback_passes == 2


def test_what_does_not_go_together_is_refused(isometric_model: Any) -> None:
    model, tokens = model_and_tokens(isometric_model)
    cache = model(tokens, use_cache=True).cache
    with pytest.raises(ValueError, match="leave out the layout, or the cache"):
        model(tokens, layout=fullband.Layout(torch.arange(9)[None].expand(3, -1)), use_cache=True)
    with pytest.raises(ValueError, match="do not fit the model's context"):
        model(torch.zeros(3, model.trunk.context - 8, dtype=torch.long), cache=cache)
    with pytest.raises(ValueError, match="feedback_passes is 0, 1, 2"):
        model(tokens, -1, cache=cache)
