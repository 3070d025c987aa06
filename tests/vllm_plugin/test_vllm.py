"""Our models in vLLM, on a CPU: every mode equals the same model decoded here, whatever vLLM does with its batch.

Needs an environment of its own (.ci/vllm): skipped where vLLM is not installed. Weights are near-isometric: with ordinary random ones
rounding grows by a factor with every fed-back token, and two correct computations drift apart.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_plugin.asking import MODES, answers, asked, carried, expected, prompts

pytestmark = pytest.mark.vllm
vllm = pytest.importorskip("vllm", reason="vLLM is not installed")


@pytest.fixture(scope="module")
def llm(start: Callable[..., Any]) -> Any:
    return start()


@pytest.mark.parametrize(("mode", "passes"), MODES)
def test_sixteen_requests_over_eight_slots(llm: Any, here: Any, mode: str, passes: int | None) -> None:
    given = prompts()
    found = answers(llm, given, [asked(mode, passes, 40)] * 16)
    assert found == expected(here, given, mode, passes, 40)
    if mode != "standard":
        plain = expected(here, given, "standard", None, 40)
        assert sum(one != other for one, other in zip(found, plain, strict=True)) >= 15, "the mode is seen in the answers"


def test_modes_mixed_in_one_batch(llm: Any, here: Any) -> None:
    given, modes = prompts(), [MODES[number % 4] for number in range(16)]
    found = answers(llm, given, [asked(*mode, 12 + 5 * number) for number, mode in enumerate(modes)])
    for number, (prompt, (mode, passes)) in enumerate(zip(given, modes, strict=True)):
        assert found[number] == expected(here, [prompt], mode, passes, 12 + 5 * number)[0], (number, mode, passes)


def test_the_default_mode_is_the_models(llm: Any, here: Any) -> None:
    given = prompts(4)
    assert answers(llm, given, [asked(None, None, 20)] * 4) == expected(here, given, "soft", None, 20)


def test_a_wrong_history_is_seen(llm: Any, here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: states handed to another request."""
    from fullband.vllm.carried import Carried

    real = Carried.before_generated

    def rotated(self: Any, chunks: Any) -> Any:
        rows, before = real(self, chunks)
        return rows, before[1:] + before[:1]

    monkeypatch.setattr(Carried, "before_generated", rotated)
    given = prompts(8)
    found = answers(llm, given, [asked("soft", None, 30)] * 8)
    assert sum(one == other for one, other in zip(found, expected(here, given, "soft", None, 30), strict=True)) <= 1


def test_no_state_is_left_behind(llm: Any) -> None:
    answers(llm, prompts(2), [asked("soft", None, 3)] * 2)
    answers(llm, prompts(1), [asked("standard", None, 2)])
    assert len(carried(llm).histories) <= 1, "of the request that ended last: vLLM says so with the next step"


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({"mode": "sofd"}, "unknown mode 'sofd'"),
        ({"feedback_passes": "exact"}, "fullband serve"),
        ({"mode": "soft", "feedback_passes": 2}, "fused"),
    ],
)
def test_a_wrong_request_is_refused_and_the_engine_goes_on(llm: Any, here: Any, extra: dict[str, Any], why: str) -> None:
    with pytest.raises(Exception, match=why):
        answers(llm, [[1, 2, 3]], [vllm.SamplingParams(max_tokens=2, detokenize=False, extra_args=extra)])
    assert answers(llm, [[1, 2, 3]], [asked("soft", None, 5)]) == expected(here, [[1, 2, 3]], "soft", None, 5)


# From here on engines of their own: vLLM keeps one at a time in a process.


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, "speculative"),
    ],
)
def test_what_cannot_work_is_refused_at_start(start: Callable[..., Any], settings: dict[str, Any], why: str) -> None:
    with pytest.raises(Exception, match=why):
        start(**settings)


def test_a_missing_weight_of_the_connection_is_named(folder: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    del tensors["connection.mergers.0.gate.weight"]
    save_file(tensors, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    with pytest.raises(Exception, match="gate"):
        start(model=str(tmp_path / "m"))
