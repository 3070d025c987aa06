"""What else a request may ask of vLLM, and what may become of it, in every mode: log-probabilities of prompts, seeds, priorities, the whole
context, being cut off, a cache that is emptied under it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_plugin.asking import answers, asked, carried, expected
from vllm_plugin.conftest import V2
from vllm_plugin.test_conditions import CHUNKS, MODES, ONE_PASS, Asked, sharing

pytestmark = pytest.mark.vllm
vllm = pytest.importorskip("vllm", reason="vLLM is not installed")

TWO_KV = {"additional_config": {"fused": "two_kv"}, "enable_prefix_caching": True, **CHUNKS}
SETTINGS = [{"block_size": 32}, TWO_KV, TWO_KV | {"block_size": 128, "max_num_batched_tokens": 50}]


@pytest.fixture(scope="module", params=SETTINGS, ids=["whole", "two_kv", "large blocks"])
def llm(request: pytest.FixtureRequest, start: Callable[..., Any]) -> Any:
    return start(**request.param)


def with_mode(number: int, new: int, **others: Any) -> Any:
    return asked(*ONE_PASS[number % 3], new, **others)


def stepped(llm: Any) -> dict[str, list[int]]:
    """Answers of all requests that the engine still has."""
    found = {}
    while llm.llm_engine.has_unfinished_requests():
        found |= {one.request_id: list(one.outputs[0].token_ids) for one in llm.llm_engine.step() if one.finished}
    return found


def test_log_probabilities_of_prompts(llm: Any, here: Any) -> None:
    from fullband.decode.prefill import prefill_with_states

    given = sharing(6)
    found = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in given], [with_mode(i, 8, prompt_logprobs=1) for i in range(6)], use_tqdm=False
    )
    for number, (prompt, one) in enumerate(zip(given, found, strict=True)):
        mode, passes = ONE_PASS[number % 3]
        assert list(one.outputs[0].token_ids) == expected(here, [prompt], mode, passes, 8)[0]
        states = prefill_with_states(here, [prompt], passes or 0)[1][0]
        right = here.trunk.head(states).log_softmax(-1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        told = [one.prompt_logprobs[place][token].logprob for place, token in enumerate(prompt[1:], start=1)]
        assert torch.allclose(torch.tensor(told), right.float(), atol=1e-3), (len(prompt), mode)


def test_a_whole_context(llm: Any, here: Any) -> None:
    prompt = torch.randint(512, (250,), generator=torch.Generator().manual_seed(4)).tolist()
    for mode in ONE_PASS:
        assert answers(llm, [prompt], [asked(*mode, 6)]) == expected(here, [prompt], *mode, 6)


def test_some_are_cut_off(llm: Any, here: Any) -> None:
    given = sharing(4)
    for number, prompt in enumerate(given):
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, with_mode(number, 40))
    for _ in range(5):
        llm.llm_engine.step()
    llm.llm_engine.abort_request(["0", "2"])
    found = stepped(llm)
    assert {number: found[str(number)] for number in (1, 3)} == {
        number: expected(here, [given[number]], *ONE_PASS[number % 3], 40)[0] for number in (1, 3)
    }


def test_the_cache_is_emptied_under_them(llm: Any, here: Any) -> None:
    """All that run are dropped and computed again."""
    given = sharing(4)
    for number, prompt in enumerate(given):
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, with_mode(number, 30))
    for _ in range(9):
        llm.llm_engine.step()
    assert llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
    found = stepped(llm)
    for number, prompt in enumerate(given):
        assert found[str(number)] == expected(here, [prompt], *ONE_PASS[number % 3], 30)[0], number
    answers(llm, [[1]], [asked("standard", None, 1)])
    assert not carried(llm).histories


def test_seeds_draw_the_same_beside_others(llm: Any, here: Any) -> None:
    given = sharing(6)
    params = [with_mode(number, 15, temperature=1.0, seed=5, repetition_penalty=1.3, min_p=0.01) for number in range(6)]
    try:
        drawn = answers(llm, given, params)
    except vllm.exceptions.VLLMValidationError as refused:  # vLLM itself would end at it
        assert "V1 runner on a CPU" in str(refused) and not V2
        assert answers(llm, [[1, 2, 3]], [asked("soft", None, 5)]) == expected(here, [[1, 2, 3]], "soft", None, 5)
        return
    assert drawn == answers(llm, given[::-1], params[::-1])[::-1]


def test_priorities(start: Callable[..., Any], here: Any, preempted: list[str]) -> None:
    turn = Asked(here, MODES)
    llm = start(scheduling_policy="priority", num_gpu_blocks_override=9, block_size=32)
    given = [{"prompt_token_ids": prompt} for prompt in turn.given]
    params = [asked(*mode, 24) for mode in turn.modes]
    found = llm.generate(given, params, use_tqdm=False, priority=[number % 3 for number in range(16)])
    for one, prompt, mode in zip(found, turn.given, turn.modes, strict=True):
        assert list(one.outputs[0].token_ids) == expected(here, [prompt], *mode, 24)[0]
