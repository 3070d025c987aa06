"""Our models in vLLM, on a CPU: every mode equals the same model decoded here, whatever vLLM does with its batch.

Needs an environment of its own (.ci/vllm): skipped where vLLM is not installed. Weights are near-isometric: with ordinary random ones
rounding grows by a factor with every fed-back token, and two correct computations drift apart.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.vllm
vllm = pytest.importorskip("vllm", reason="vLLM is not installed")
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}

from fullband.decode import generate  # noqa: E402
from fullband.hf import attach  # noqa: E402

MODES = [("standard", None), ("soft", None), ("fused", 1), ("fused", 2)]
LENGTHS = (1, 2, 5, 17, 33, 64, 90, 120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    shape = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, max_position_embeddings=256, tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    lm = LlamaForCausalLM(shape).eval()
    for name, parameter in lm.named_parameters():
        if parameter.dim() == 2:
            embeds = "embed" in name or "lm_head" in name
            nn.init.normal_(parameter, std=1.0 if embeds else 0.35 / parameter.shape[1] ** 0.5)
    model = attach(lm, fusion="gated")
    for merger in model.connection.mergers:
        nn.init.orthogonal_(merger.state.weight)
        nn.init.normal_(merger.gate.weight, std=0.05)
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def here(folder: Path) -> Any:
    from fullband.loading import load_model

    return load_model(folder)


@pytest.fixture(scope="module")
def start(folder: Path) -> Callable[..., Any]:
    def engine(**settings: Any) -> Any:
        given = {
            "model": str(folder),
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "max_num_seqs": 8,
            **settings,
        }
        return vllm.LLM(**given)

    return engine


def prompts(count: int = 16) -> list[list[int]]:
    torch.manual_seed(8)
    return [torch.randint(512, (LENGTHS[number % len(LENGTHS)],)).tolist() for number in range(count)]


def asked(mode: str | None, passes: int | None, new: int) -> Any:
    extra = {name: value for name, value in (("mode", mode), ("feedback_passes", passes)) if value is not None}
    return vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, extra_args=extra or None)


def answers(llm: Any, given: list[list[int]], params: list[Any]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in given], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def expected(here: Any, given: list[list[int]], mode: str, passes: int | None, new: int) -> list[list[int]]:
    return [generate(here, [prompt], mode, passes, max_new_tokens=new)[0].tokens for prompt in given]


def carried(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model.carried


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


def test_preempted_requests_are_computed_again(start: Callable[..., Any], here: Any) -> None:
    """Too few blocks for all: vLLM drops requests in the middle, and computes prompt and answer in one step later."""
    from vllm.v1.core.sched.scheduler import Scheduler

    counted: list[int] = []
    original = Scheduler._preempt_request
    Scheduler._preempt_request = lambda self, *args, **kwargs: counted.append(1) or original(self, *args, **kwargs)
    try:
        llm = start(num_gpu_blocks_override=9, block_size=32, max_model_len=224)
        given, modes = prompts(), [MODES[number % 4] for number in range(16)]
        found = answers(llm, given, [asked(*mode, 80) for mode in modes])
    finally:
        Scheduler._preempt_request = original
    assert counted, "something was preempted"
    for number, (prompt, (mode, passes)) in enumerate(zip(given, modes, strict=True)):
        assert found[number] == expected(here, [prompt], mode, passes, 80)[0], (number, mode, passes)


def test_compiled(start: Callable[..., Any], here: Any) -> None:
    llm = start(enforce_eager=False)
    given, modes = prompts(8), [MODES[number % 4] for number in range(8)]
    found = answers(llm, given, [asked(*mode, 30) for mode in modes])
    for number, (prompt, (mode, passes)) in enumerate(zip(given, modes, strict=True)):
        assert found[number] == expected(here, [prompt], mode, passes, 30)[0], (number, mode, passes)


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
