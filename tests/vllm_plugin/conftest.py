"""vLLM in this process, and a model whose greedy tokens two correct computations agree on.

The V2 runner needs Triton, which has no back end for CPUs: with TRITON_INTERPRET=1 vLLM's kernels run in Triton's interpreter, once Triton
is told that there is one. The tests that `.ci/vllm` runs so are the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
if V2:
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=type("Driver", (), {"is_active": staticmethod(lambda: True)}), compiler=None)


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted model with near-isometric weights: with ordinary random ones rounding grows by a factor with every fed-back token."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from transformers import LlamaConfig, LlamaForCausalLM

    from fullband.hf import attach

    torch.manual_seed(3)
    shape = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, max_position_embeddings=256, tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
        bos_token_id=None, eos_token_id=None,
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


@pytest.fixture(scope="package")
def here(folder: Path) -> Any:
    from fullband.loading import load_model

    return load_model(folder)


@pytest.fixture(scope="package")
def start(folder: Path) -> Callable[..., Any]:
    """An engine; vLLM keeps one at a time in a process, so the one before ends."""
    import vllm

    running: list[Any] = []

    def engine(**settings: Any) -> Any:
        while running:
            running.pop().llm_engine.engine_core.shutdown()
        given = {"model": str(folder), "skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "max_num_seqs": 8}
        running.append(vllm.LLM(**given | settings))
        return running[0]

    return engine


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Requests that vLLM has dropped in the middle, for want of blocks."""
    from vllm.v1.core.sched.scheduler import Scheduler

    dropped: list[str] = []
    real = Scheduler._preempt_request

    def noted(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        dropped.append(request.request_id)
        return real(self, request, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", noted)
    yield dropped


@pytest.fixture
def asynchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM switches asynchronous scheduling off on CPUs; here it stays on."""
    from vllm.platforms.cpu import CpuPlatform

    real = CpuPlatform.check_and_update_config.__func__

    def kept(cls: Any, vllm_config: Any) -> None:
        real(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(kept))
