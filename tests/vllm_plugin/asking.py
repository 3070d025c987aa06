"""Prompts, requests and right answers of the plugin's tests."""

from __future__ import annotations

from typing import Any

import torch

MODES: list[tuple[str, int | None]] = [("standard", None), ("soft", None), ("fused", 1), ("fused", 2)]
LENGTHS = (1, 2, 5, 17, 33, 64, 90, 120)


def prompts(count: int = 16) -> list[list[int]]:
    torch.manual_seed(8)
    return [torch.randint(512, (LENGTHS[number % len(LENGTHS)],)).tolist() for number in range(count)]


def asked(mode: str | None, passes: int | None, new: int, **others: Any) -> Any:
    from vllm import SamplingParams

    extra = {name: value for name, value in (("mode", mode), ("feedback_passes", passes)) if value is not None}
    given = {"temperature": 0, "max_tokens": new, "ignore_eos": True, "detokenize": False, "extra_args": extra or None}
    return SamplingParams(**given | others)


def outputs(llm: Any, given: list[list[int]], params: list[Any]) -> list[Any]:
    found: list[Any] = llm.generate([{"prompt_token_ids": prompt} for prompt in given], params, use_tqdm=False)
    return found


def answers(llm: Any, given: list[list[int]], params: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs(llm, given, params)]


def expected(here: Any, given: list[list[int]], mode: str, passes: Any, new: int) -> list[list[int]]:
    from fullband.decode import generate

    return [generate(here, [prompt], mode, passes, max_new_tokens=new)[0].tokens for prompt in given]


def carried(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model.carried
