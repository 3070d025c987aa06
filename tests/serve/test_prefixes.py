"""Prompts whose beginning is kept: answers are those of a server that keeps nothing, and memory stays within its bound."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import torch

from fullband.data.tokenizers import ByteTokenizer
from fullband.decode.modes import Mode, resolve_mode
from fullband.model import FullBandModel
from fullband.serve import prefixes
from fullband.serve.engine import LocalEngine, Prefill
from fullband.serve.prefixes import Prefix
from fullband.serve.scheduler import Scheduler
from serve.test_api import TEMPLATE, client, post
from serve.test_scheduler import MODES, answer, ask, settle
from trunk.huggingface.families import VOCABULARY, Converted, build

SMALL, BIG = 4, 2**30
NATIVE: dict[str, dict[str, Any]] = {
    "windows": {},
    "gated at depth 1": dict(entry=1),
    "three states carried": dict(carried_window=3),
    "two entries, sources on both sides": dict(entry=[1, 2], source=[0, 1, 3]),
}
CONVERTED = ["llama", "gemma3_text", "mistral"]
PASSES = [("standard", None), ("soft", None), ("fused", 1), ("fused", 3), ("fused", "exact")]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "BLOCK", SMALL)


def run(engine: LocalEngine, prompts: list[list[int]], mode: Mode) -> Prefill:
    *_, done = engine.prefill(prompts, mode)
    assert done is not None
    return done


def held(prefix: Prefix) -> int:
    """Bytes of the storages that a prefix keeps alive."""
    caches = [cache for cache in (prefix.prefilled.below, *(each.cache for each in prefix.prefilled.passes)) if cache is not None]
    slots = [
        view for cache in caches for layer in cache.layers for view in ([layer.keys, layer.values] if hasattr(layer, "keys") else [layer])
    ]
    tensors = [view._store.tensor for view in slots] + list(prefix.states)
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def batches(draw: random.Random, vocabulary: int) -> tuple[list[list[list[int]]], list[list[int]]]:
    """Prompts that share beginnings with earlier ones, and how many tokens of each are then found."""

    def some(count: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(count)]

    first, other = some(18), some(11)
    return (
        [
            [first + some(2), other],
            [first + some(1), some(3), first[:9] + some(1), first + some(7), some(5)],
            [first],
            [other + some(4)],
            [other],
        ],
        [[0, 0], [16, 0, 8, 16, 0], [16], [8], [8]],
    )


@pytest.mark.parametrize(("name", "passes"), PASSES)
@pytest.mark.parametrize("kind", [*NATIVE, *CONVERTED])
@pytest.mark.usefixtures("small_blocks")
@torch.no_grad()
def test_states_are_those_of_prompts_that_are_run_whole(isometric_model: Any, kind: str, name: str, passes: Any) -> None:
    """And of what decoding makes of them; joined rows stand in the order of their prompts."""
    connection = NATIVE.get(kind)
    model: Any = (
        Converted(build(kind)) if connection is None else isometric_model(context=48, layers=4, full_every=2, window=6, **connection)
    )
    size, near = (VOCABULARY, 1e-6) if connection is None else (23, 1e-10)
    plain, keeping, mode = LocalEngine(model, chunk=5), LocalEngine(model, chunk=5, prefix_bytes=BIG), resolve_mode(name, passes)
    for prompts, cached in zip(*batches(random.Random(4), size), strict=True):
        expected, found = run(plain, prompts, mode), run(keeping, prompts, mode)
        assert list(found.cached) == cached
        ours, theirs = found.state, expected.state
        for place in range(8):
            torch.testing.assert_close(ours.top_BD, theirs.top_BD, rtol=0, atol=near)
            tokens = torch.tensor([(7 * place + row) % size for row in range(len(prompts))])
            ours, theirs = keeping.step(ours, tokens, mode), plain.step(theirs, tokens, mode)
    assert sum(held(prefix) for prefix in keeping.prefixes._kept) == keeping.kept_bytes > 0


@pytest.mark.usefixtures("small_blocks")
@torch.no_grad()
def test_other_passes_find_nothing_and_a_foreign_prefix_would_show(served_model: FullBandModel) -> None:
    """Soft and Standard share their prompts; the negative control of the test above."""
    engine, prompt = LocalEngine(served_model, prefix_bytes=BIG), list(b"a prompt of some length")
    assert list(run(engine, [prompt], resolve_mode("standard")).cached) == [0]
    assert list(run(engine, [prompt], resolve_mode("soft")).cached) == [20]
    fused = resolve_mode("fused", "exact")
    found = run(engine, [prompt], fused)
    assert list(found.cached) == [0]
    plain, length = engine.prefixes.find(0, prompt)
    assert plain is not None
    stolen = plain.first(length, served_model.connection)
    engine.prefixes.find = lambda *_: (Prefix(plain.tokens, type(stolen)(stolen.passes, exact=True), plain.states), length)  # type: ignore[method-assign]
    assert float((run(engine, [prompt], fused).state.top_BD - found.state.top_BD).abs().max()) > 1e-3


@pytest.mark.parametrize("family", ["falcon_h1", "lfm2"])
@torch.no_grad()
def test_recurrent_layers_keep_nothing(family: str) -> None:
    engine, prompt = LocalEngine(Converted(build(family)), prefix_bytes=BIG), list(range(20))
    for _ in range(2):
        assert list(run(engine, [prompt], resolve_mode("soft")).cached) == [0]
    assert engine.kept_bytes == 0


@pytest.mark.usefixtures("small_blocks")
@torch.no_grad()
def test_the_bound(served_model: FullBandModel) -> None:
    """The least recently used goes first; what never fits is not kept; nothing is held beside what is counted."""
    mode = resolve_mode("soft")
    engine = LocalEngine(served_model, prefix_bytes=BIG)
    one, two, three = (list(word * 10) for word in (b"abcd", b"efgh", b"ijkl"))
    run(engine, [one], mode)
    each = engine.kept_bytes
    engine = LocalEngine(served_model, prefix_bytes=2 * each)
    for prompt in (one, two, one, three):
        run(engine, [prompt], mode)
        assert engine.kept_bytes <= 2 * each
    assert [any(run(engine, [prompt], mode).cached) for prompt in (one, three, two)] == [True, True, False]
    assert len(engine.prefixes) == 2 and sum(map(held, engine.prefixes._kept)) == engine.kept_bytes
    assert {prefix for holders in engine.prefixes._holders.values() for prefix in holders} == set(engine.prefixes._kept)
    tight = LocalEngine(served_model, prefix_bytes=each - 1)
    run(tight, [one], mode)
    assert tight.kept_bytes == 0 and not tight.prefixes._holders


@pytest.mark.usefixtures("small_blocks")
@torch.no_grad()
def test_what_is_worth_keeping(served_model: FullBandModel) -> None:
    """A longer prompt takes the place of its beginning; one that adds little to what another one begins with is not kept."""
    engine, mode, base = LocalEngine(served_model, prefix_bytes=BIG), resolve_mode("soft"), list(b"abcd" * 8)

    def kept(*prompts: list[int]) -> list[int]:
        for prompt in prompts:
            run(engine, [prompt], mode)
        return sorted(len(prefix.tokens) for prefix in engine.prefixes._kept)

    assert kept(base) == [32] and kept(base + [1] * 8) == [40]
    assert kept(base, [*base, 1]) == [40], "what is there already"
    assert kept(base + [2] * 8) == [40], "a fifth is new"
    assert kept(base + [3] * 16) == [40, 48], "a third is new"
    assert kept([1, 2, 3]) == [40, 48], "no whole block"


def test_marks_that_coincide_are_not_mistaken(served_model: FullBandModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "_marks", lambda passes, tokens: iter(range(len(tokens) // 16)))
    engine, mode = LocalEngine(served_model, prefix_bytes=BIG), resolve_mode("soft")
    run(engine, [list(range(40))], mode)
    assert list(run(engine, [list(range(40, 80))], mode).cached) == [0]


@pytest.fixture
def keeping(served_model: FullBandModel) -> Any:
    made = Scheduler(LocalEngine(served_model, chunk=16, prefix_bytes=BIG), ByteTokenizer(), most_rows=4, most_waiting=64)
    yield made
    made.close(timeout=20)


@pytest.mark.usefixtures("small_blocks")
def test_answers_are_those_of_a_server_that_keeps_nothing(scheduler: Scheduler, keeping: Scheduler) -> None:
    """Several turns in every mode, answers among the prompts of the next one; samples, log-probabilities, neighbours of other modes."""
    draw = random.Random(2)
    for number, (mode, passes) in enumerate(MODES * 2):
        text = b"instructions: " + bytes(draw.randrange(97, 123) for _ in range(8))
        for turn in range(3):
            sampling = {"temperature": 0.9, "seed": number, "n": 2} if turn == 1 else {}
            options = {"mode": mode, "feedback_passes": passes, "max_new_tokens": 9, "logprobs": 2, **sampling}
            beside = [ask(server, text[:20] + b"?", mode="soft", max_new_tokens=3)[1] for server in (scheduler, keeping)]
            heard = [ask(server, text, **options)[1] for server in (scheduler, keeping)]
            expected, found = (read(events, options.get("n", 1)) for events in heard)
            assert [token for token, _ in found] == [token for token, _ in expected]
            assert [value for _, value in found] == pytest.approx([value for _, value in expected], abs=1e-8)
            answer(beside[0])
            answer(beside[1])
            text += bytes(token for token, _ in found[:9]) + b"."
    settle(keeping)
    assert keeping.counters.prefix_hits > 30 and keeping.counters.cached_tokens > 600 and scheduler.counters.prefix_hits == 0
    assert all(group.state is None for group in keeping._groups.values())


def read(events: Any, n: int) -> list[tuple[int, float]]:
    """(token, log-probability) of all samples, sample by sample."""
    rows: list[list[tuple[int, float]]] = [[] for _ in range(n)]
    left = n
    while left:
        event = events.get(timeout=30)
        assert event.error is None, event.error
        if event.token:
            rows[event.row].append((event.token.token, event.token.logprob))
        left -= event.finish_reason is not None
    return [info for row in rows for info in row]


def test_usage_and_metrics_say_what_was_cached(keeping: Scheduler, serving: Callable[..., str]) -> None:
    address = serving(template=TEMPLATE, scheduler=keeping)
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "the same question again"}], "max_tokens": 2}
    api = client(address)
    usage = [api.chat.completions.create(**asked).usage for _ in range(2)]
    assert [one.prompt_tokens_details.cached_tokens for one in usage if one and one.prompt_tokens_details] == [0, 16]
    *_, last = api.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert last.usage and last.usage.prompt_tokens_details and last.usage.prompt_tokens_details.cached_tokens == 16
    scored = post(address, prompt="user:the same question again", max_tokens=0, echo=True, logprobs=0).json()
    assert scored["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}, "every state is needed"
    text = httpx.get(f"{address}/metrics", timeout=30).text
    assert "fullband_prefix_hits_total 2.0" in text and "fullband_cached_tokens_total 32.0" in text
    assert f"fullband_prefix_bytes {float(keeping.engine.kept_bytes)}" in text and keeping.engine.kept_bytes > 0
