"""Our models in vLLM, on a CPU: every mode equals the same model decoded here, whatever vLLM does with its batch.

Needs an environment of its own (.ci/vllm): skipped where vLLM is not installed. Weights are near-isometric: with ordinary random ones
rounding grows by a factor with every fed-back token, and two correct computations drift apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

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


def test_more_passes_than_tokens_are_evaluation_position_by_position(llm: Any, here: Any) -> None:
    given = prompts(4)
    assert answers(llm, given, [asked("fused", 10**9, 20)] * 4) == expected(here, given, "fused", "exact", 20)


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
        ({"mode": 3}, "must be a string"),
        ({"feedback_passes": -1}, "feedback_passes"),
        ({"feedback_passes": 1.5}, "feedback_passes"),
        ({"mode": "fused", "feedback_passes": [1]}, "feedback_passes"),
        ({"mode": "fused", "feedback_passes": True}, "feedback_passes"),
    ],
)
def test_a_wrong_request_is_refused_and_the_engine_goes_on(llm: Any, here: Any, extra: dict[str, Any], why: str) -> None:
    with pytest.raises(Exception, match=why):
        answers(llm, [[1, 2, 3]], [vllm.SamplingParams(max_tokens=2, detokenize=False, extra_args=extra)])
    assert answers(llm, [[1, 2, 3]], [asked("soft", None, 5)]) == expected(here, [[1, 2, 3]], "soft", None, 5)


def test_beam_search_is_refused(llm: Any) -> None:
    """By the requests that vLLM's beam search makes; over HTTP in test_server.py."""
    made = vllm.SamplingParams(logprobs=4, max_tokens=1, temperature=0, watermarking=False, detokenize=False)
    with pytest.raises(Exception, match="beam search hands in"):
        answers(llm, [[1, 2, 3]], [made])


@pytest.mark.parametrize("fused", ["two_kv", "off"])
def test_modes_that_a_setting_leaves_out_are_refused(start: Callable[..., Any], here: Any, fused: str) -> None:
    llm = start(additional_config={"fused": fused})
    with pytest.raises(Exception, match=fused):
        answers(llm, [[1, 2, 3]], [asked("fused", 2, 2)])
    assert answers(llm, [[1, 2, 3]], [asked("soft", None, 5)]) == expected(here, [[1, 2, 3]], "soft", None, 5)


# From here on engines of their own.


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline"),
        ({"tensor_parallel_size": 2}, "tensor parallelism"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, "speculative"),
        ({"enable_lora": True}, "LoRA"),
        ({"enable_prompt_embeds": True}, "prompt embeddings"),
        ({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, "another scheduler"),
        ({"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}, "a cache from elsewhere"),
        ({"additional_config": {"fused": "twokv"}}, "whole, two_kv, off"),
        ({"additional_config": {"fused": "off"}, "hf_overrides": {"latent_feedback_mode": "fused"}}, "the model's own mode"),
    ],
)
def test_what_cannot_work_is_refused_at_start(start: Callable[..., Any], settings: dict[str, Any], why: str) -> None:
    with pytest.raises(Exception, match=why):
        start(**settings)


def test_a_vllm_without_a_hook_is_refused(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    monkeypatch.delattr(GPUModelRunner, "_on_request_state_removed")
    with pytest.raises(Exception, match=r"has no .*_on_request_state_removed"):
        start()


def test_a_missing_weight_of_the_connection_is_named(folder: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    del tensors["connection.mergers.0.gate.weight"]
    save_file(tensors, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    with pytest.raises(Exception, match="damaged"):
        start(model=str(tmp_path / "m"))
    (tmp_path / "m" / "manifest.json").unlink()
    with pytest.raises(Exception, match="gate"):
        start(model=str(tmp_path / "m"))


def test_plain_vllm_equals_transformers(folder: Path, here: Any, start: Callable[..., Any], tmp_path: Path) -> None:
    """The trunk alone, as vLLM and as transformers have it: what differs elsewhere is feedback's."""
    from fullband.hf.convert import detach_folder

    given = prompts(8)
    detach_folder(folder, tmp_path / "plain")
    assert answers(start(model=str(tmp_path / "plain")), given, [asked(None, None, 40)] * 8) == expected(here, given, "standard", None, 40)


def test_rounding_does_not_grow(here: Any) -> None:
    """The weights are such that a difference of 1e-5 in a state stays one: greedy tokens can be compared."""
    from fullband.decode.modes import resolve_mode, step
    from fullband.decode.prefill import prefill

    mode = resolve_mode("soft")
    one = prefill(here, [prompts(3)[2]])
    other = replace(one, fed=replace(one.fed, before_BWD=one.fed.before_BWD + 1e-5 * torch.randn_like(one.fed.before_BWD)))
    worst = 0.0
    for token in range(40):
        one, other = (step(here, state, torch.tensor([token]), mode) for state in (one, other))
        worst = max(worst, float((one.fed.before_BWD - other.fed.before_BWD).abs().max()))
    assert 0 < worst < 1e-4
