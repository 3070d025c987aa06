"""Whatever vLLM does with a batch, every request gets the tokens that it gets alone here: chunks of prompts, cached prefixes, several
turns, requests that are dropped and computed again, asynchronous scheduling, compiled trunks; V1 and V2 runner (conftest.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_plugin.asking import MODES, answers, asked, carried, expected, outputs
from vllm_plugin.conftest import V2

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm", reason="vLLM is not installed")

Modes = list[tuple[str, int | None]]
SOFT: Modes = [("soft", None)]
ONE_PASS: Modes = [("standard", None), ("soft", None), ("fused", 1)]
NEW = 24 if V2 else 40  # vLLM's kernels are slow in Triton's interpreter
CHUNKS = {"enable_chunked_prefill": True, "max_num_batched_tokens": 64, "block_size": 32}


def sharing(count: int = 16) -> list[list[int]]:
    """Prompts of 1 to 200 tokens; every second one begins as another does."""
    torch.manual_seed(9)
    whole = [torch.randint(512, (200,)).tolist() for _ in range(2)]
    lengths = (1, 33, 64, 65, 90, 128, 160, 200)
    found = []
    for number in range(count):
        length = lengths[number % 8]
        prompt = whole[number // 8][:length]
        if number % 2:
            prompt = prompt[: length // 2] + torch.randint(512, (length - length // 2,)).tolist()
        found.append(prompt)
    return found


class Asked:
    """Sixteen requests over eight slots, the modes in turn."""

    def __init__(self, here: Any, modes: Modes, given: list[list[int]] | None = None):
        self.here, self.given = here, given or sharing()
        self.modes = [modes[number % len(modes)] for number in range(len(self.given))]

    def right(self) -> list[list[int]]:
        return [expected(self.here, [prompt], *mode, NEW)[0] for prompt, mode in zip(self.given, self.modes, strict=True)]

    def of(self, llm: Any) -> tuple[list[list[int]], int]:
        """(Answers, prompt tokens that came out of the cache)."""
        found = outputs(llm, self.given, [asked(*mode, NEW) for mode in self.modes])
        return [list(output.outputs[0].token_ids) for output in found], sum(output.num_cached_tokens or 0 for output in found)

    def next_turn(self) -> Asked:
        """Each prompt, its answer and a few tokens more are the next prompt."""
        told = [[*[*prompt, *answer][:208], 7, 8, 9] for prompt, answer in zip(self.given, self.right(), strict=True)]
        return Asked(self.here, self.modes, told)


def test_soft_in_small_chunks(start: Callable[..., Any], here: Any) -> None:
    turn = Asked(here, SOFT)
    llm = start(additional_config={"fused": "off"}, enable_prefix_caching=False, **CHUNKS | {"max_num_batched_tokens": 16})
    assert turn.of(llm)[0] == turn.right()


def test_prefixes_are_shared_over_turns(start: Callable[..., Any], here: Any) -> None:
    """Whole prompts: Standard and Soft share, Fused neither takes nor gives."""
    turn, fused = Asked(here, MODES), Asked(here, [("fused", 1)])
    llm = start(enable_prefix_caching=True, block_size=32)
    assert turn.of(llm)[0] == turn.right()
    again, cached = turn.of(llm)
    assert again == turn.right() and cached > 200
    found, cached = fused.of(llm)
    assert found == fused.right() and cached == 0
    found, cached = turn.next_turn().of(llm)
    assert found == turn.next_turn().right() and cached > 200


def test_everything_at_once(start: Callable[..., Any], here: Any, preempted: list[str]) -> None:
    """Two sets of keys and values: modes mixed, in chunks, on cached prefixes, over turns, with too few blocks for all."""
    turn = Asked(here, ONE_PASS)
    llm = start(additional_config={"fused": "two_kv"}, enable_prefix_caching=True, num_gpu_blocks_override=20, **CHUNKS)
    cached = 0
    for asking in (turn, turn, turn.next_turn()):
        found, hits = asking.of(llm)
        assert found == asking.right()
        cached += hits
    assert preempted and cached > 300
    answers(llm, [[1, 2]], [asked("standard", None, 2)])
    assert not carried(llm).histories, "no state is left behind"


def test_asynchronous_scheduling(start: Callable[..., Any], here: Any, preempted: list[str], asynchronous: None) -> None:
    turn = Asked(here, ONE_PASS)
    llm = start(additional_config={"fused": "two_kv"}, enable_prefix_caching=True, num_gpu_blocks_override=20, **CHUNKS)
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    assert isinstance(llm.llm_engine.engine_core.engine_core.scheduler, AsyncScheduler)
    for asking in (turn, turn, turn.next_turn()):
        assert asking.of(llm)[0] == asking.right()
    assert preempted


def test_whole_prompts_are_computed_again(start: Callable[..., Any], here: Any, preempted: list[str]) -> None:
    turn = Asked(here, MODES)
    llm = start(num_gpu_blocks_override=16, block_size=32)
    assert turn.of(llm)[0] == turn.right()
    assert preempted


@pytest.mark.skipif(V2, reason="Triton's interpreter gives Inductor no target")
@pytest.mark.parametrize(
    ("modes", "settings"), [(ONE_PASS, {"additional_config": {"fused": "two_kv"}, **CHUNKS}), (MODES, {"block_size": 32})]
)
def test_compiled(start: Callable[..., Any], here: Any, modes: Modes, settings: dict[str, Any]) -> None:
    turn = Asked(here, modes)
    llm = start(enforce_eager=False, enable_prefix_caching=True, **settings)
    for asking in (turn, turn.next_turn()):
        assert asking.of(llm)[0] == asking.right()


# What the plugin does beyond vLLM, left out: the tests above would see it.


def test_answers_in_the_cache_would_be_seen(start: Callable[..., Any], here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own scheduler hands blocks with generated tokens, computed with feedback, to the next turn."""
    from vllm.v1.core.sched.scheduler import Scheduler

    monkeypatch.setattr("fullband.vllm.scheduler.FullBandScheduler", Scheduler)
    turn = Asked(here, SOFT)
    llm = start(additional_config={"fused": "off"}, enable_prefix_caching=True, **CHUNKS)
    assert turn.of(llm)[0] == turn.right()
    found, cached = turn.next_turn().of(llm)
    assert found != turn.next_turn().right() and cached > 0


def test_forgotten_states_would_be_seen(
    start: Callable[..., Any], here: Any, preempted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the last state of each request is kept, as in App. D: what is computed again takes it for all of its tokens."""
    from fullband.vllm.carried import _History

    monkeypatch.setattr(_History, "__getitem__", lambda self, place: self._last[-1] if self._last else self._stacked[-1][-1])
    turn = Asked(here, SOFT)
    llm = start(num_gpu_blocks_override=9, block_size=32)
    found = turn.of(llm)[0]
    assert preempted
    wrong = sum(one != other for one, other in zip(found, turn.right(), strict=True))
    assert 0 < wrong <= len(set(preempted))


def test_one_set_in_chunks_would_be_seen(start: Callable[..., Any], here: Any) -> None:
    """The first pass of a later chunk attends to what the last pass of an earlier one wrote."""
    turn = Asked(here, [("fused", 1)])
    llm = start(additional_config={"fused": "two_kv"}, enable_prefix_caching=False, **CHUNKS)
    model = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model
    assert turn.of(llm)[0] == turn.right()
    model.first_pass = model.lm
    found = turn.of(llm)[0]
    wrong = [len(prompt) for prompt, one, other in zip(turn.given, found, turn.right(), strict=True) if one != other]
    assert wrong and min(wrong) > 16, "prompts in one chunk are right"
