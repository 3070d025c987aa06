"""The running batch: whatever joins and leaves beside a request, its tokens are those of the request alone."""

from __future__ import annotations

import queue
import random
import threading
import time
from typing import Any

import pytest
import torch

from fullband.data.tokenizers import ByteTokenizer
from fullband.decode import answer_logprobs, generate_texts
from fullband.decode.options import GenerateOptions
from fullband.model import FullBandModel
from fullband.serve.engine import LocalEngine
from fullband.serve.rows import Event, Request
from fullband.serve.scheduler import FullError, Scheduler

MODES = [("standard", None), ("soft", None), ("fused", 1), ("fused", 2), ("fused", "exact"), ("fused", "converged")]


def ask(scheduler: Scheduler, prompt: bytes, **options: Any) -> tuple[Request, queue.Queue[Event]]:
    events: queue.Queue[Event] = queue.Queue()
    more = {name: options.pop(name) for name in ("logprobs", "prompt_logprobs", "presence", "frequency") if name in options}
    request = Request(list(prompt), GenerateOptions(**options), events.put, **more)
    scheduler.submit(request)
    return request, events


def answer(events: queue.Queue[Event], n: int = 1) -> list[tuple[str, list[int], str | None]]:
    """(text, tokens, why it ended) of every sample."""
    found: list[Any] = [["", [], None] for _ in range(n)]
    while any(reason is None for _, _, reason in found):
        event = events.get(timeout=30)
        assert event.error is None, event.error
        row = found[event.row]
        row[0] += event.text
        row[1] += [event.token.token] if event.token else []
        row[2] = event.finish_reason or row[2]
    return [tuple(row) for row in found]


def settle(scheduler: Scheduler) -> None:
    """Nothing runs or waits any more: rows leave just after their last event."""
    until = time.monotonic() + 10
    while scheduler.running or scheduler.waiting:
        assert time.monotonic() < until
        time.sleep(0.001)


def test_sixteen_requests_of_every_mode_over_four_places(served_model: FullBandModel, scheduler: Scheduler) -> None:
    draw = random.Random(3)
    asked = []
    for number in range(18):
        mode, passes = MODES[number % len(MODES)]
        prompt = bytes(draw.randrange(97, 123) for _ in range(draw.choice([1, 5, 17, 40])))
        sampling = {"temperature": 0.8, "seed": number} if number % 3 == 2 else {}
        asked.append((prompt, {"mode": mode, "feedback_passes": passes, "max_new_tokens": draw.randrange(1, 30), **sampling}))
    heard = [ask(scheduler, prompt, **options)[1] for prompt, options in asked]
    for (prompt, options), events in zip(asked, heard, strict=True):
        alone = generate_texts(served_model, ByteTokenizer(), [list(prompt)], **options)[0]
        assert answer(events) == [(alone.text, alone.tokens, alone.finish_reason)], options
    settle(scheduler)
    assert all(group.state is None for group in scheduler._groups.values()), "no state is left"


def test_a_state_of_another_request_would_show(served_model: FullBandModel) -> None:
    """The negative control of the test above: modes give different texts here."""
    texts = {
        generate_texts(served_model, ByteTokenizer(), [list(b"hello there")], mode, passes, max_new_tokens=25)[0].text
        for mode, passes in MODES[:4]
    }
    assert len(texts) == 4


@pytest.mark.parametrize(
    "options", [{"n": 3, "temperature": 1.0, "seed": 7}, {"repetition_penalty": 1.7}, {"min_new_tokens": 6, "stop": "e"}]
)
def test_options_are_those_of_generate(served_model: FullBandModel, scheduler: Scheduler, options: dict[str, Any]) -> None:
    beside = ask(scheduler, b"something else beside it", max_new_tokens=20)[1]
    _, events = ask(scheduler, b"abc abd abe", mode="soft", max_new_tokens=12, **options)
    made = generate_texts(served_model, ByteTokenizer(), [list(b"abc abd abe")], "soft", max_new_tokens=12, **options)
    assert answer(events, options.get("n", 1)) == [(one.text, one.tokens, one.finish_reason) for one in made]
    answer(beside)


@pytest.mark.parametrize("mode", ["standard", "soft"])
@torch.no_grad()
def test_log_probabilities_are_those_of_a_scorer(served_model: FullBandModel, scheduler: Scheduler, mode: str) -> None:
    prompt = list(b"the quick")
    _, events = ask(scheduler, bytes(prompt), mode=mode, max_new_tokens=10, temperature=1.0, logprobs=3, prompt_logprobs=True)
    first = events.get(timeout=30)
    assert first.prompt is not None and [info.token for info in first.prompt] == prompt and first.prompt[0].logprob is None
    plain = served_model(torch.tensor([prompt]), 0).logits[0].log_softmax(-1)
    for place, info in enumerate(first.prompt[1:]):
        assert info.logprob == pytest.approx(float(plain[place, info.token]), abs=1e-9) and len(info.top) == 3
    infos = []
    while True:
        event = events.get(timeout=30)
        infos += [event.token] if event.token else []
        if event.finish_reason:
            break
    (expected,) = answer_logprobs(served_model, [prompt], [[info.token for info in infos]], mode)["exact"]
    torch.testing.assert_close(torch.tensor([info.logprob for info in infos], dtype=torch.float64), expected, atol=1e-8, rtol=0)
    assert all(info.top[0][1] >= info.top[1][1] for info in infos)


def test_penalties_make_tokens_that_were_made_less_likely(scheduler: Scheduler) -> None:
    plain = answer(ask(scheduler, b"aaaa", mode="standard", max_new_tokens=30)[1])[0][1]
    assert len(set(plain)) < len(plain)
    frequent = answer(ask(scheduler, b"aaaa", mode="standard", max_new_tokens=30, frequency=100.0)[1])[0][1]
    once = answer(ask(scheduler, b"aaaa", mode="standard", max_new_tokens=30, presence=1000.0)[1])[0][1]
    assert len(set(frequent)) == len(frequent) == len(set(once)) == 30


def test_cancelled_requests_leave_and_others_do_not_notice(served_model: FullBandModel, scheduler: Scheduler) -> None:
    alone = generate_texts(served_model, ByteTokenizer(), [list(b"stays")], "soft", max_new_tokens=60)[0]
    _, stays = ask(scheduler, b"stays", max_new_tokens=60)
    gone = [ask(scheduler, b"goes %d" % number, max_new_tokens=80) for number in range(8)]
    for request, events in gone[:3]:
        events.get(timeout=30)
        scheduler.cancel(request)
    for request, _ in gone[3:]:
        scheduler.cancel(request)
    assert answer(stays) == [(alone.text, alone.tokens, alone.finish_reason)]
    again = ask(scheduler, b"stays", max_new_tokens=60)[1]
    assert answer(again)[0][0] == alone.text
    settle(scheduler)


def test_a_prompt_does_not_begin_again_for_others_that_leave(served_model: FullBandModel) -> None:
    """Prompts that are prefilled together, of which one is cancelled in between: the other loses nothing."""
    ran = list[int]()

    class Counting(LocalEngine):
        def prefill(self, prompts: Any, mode: Any, wants_states: bool = False) -> Any:
            ran.append(len(prompts))
            for part in super().prefill(prompts, mode, wants_states):
                if ran == [2] and part is None:
                    made.cancel(leaves)  # after the first part
                yield part

    made = Scheduler(Counting(served_model, chunk=16), ByteTokenizer(), most_rows=4, most_waiting=8)
    options: dict[str, Any] = {"mode": "fused", "feedback_passes": "exact", "max_new_tokens": 6}
    with made._wake:  # both are there when it looks
        leaves, _ = ask(made, b"one that leaves and is long", **options)
        _, stays = ask(made, b"one that stays", **options)
    found = answer(stays)
    made.close(20)
    alone = generate_texts(served_model, ByteTokenizer(), [list(b"one that stays")], **options)[0]
    assert ran == [2] and made.counters.cancelled == 1
    assert found == [(alone.text, alone.tokens, alone.finish_reason)]


def test_what_cannot_be_served_is_refused(served_model: FullBandModel, scheduler: Scheduler) -> None:
    with pytest.raises(ValueError, match="exceeds the model's context"):
        ask(scheduler, b"x" * 200, max_new_tokens=5)
    with pytest.raises(ValueError, match="n must be at most 4, got 5"):
        ask(scheduler, b"x", max_new_tokens=5, n=5)
    for prompt, why in (([1, 999], "token id 999 at position 1 is outside 0 to 256"), ([], "at least one token")):
        with pytest.raises(ValueError, match=why):
            scheduler.submit(Request(prompt, GenerateOptions(max_new_tokens=3), lambda event: None))
    small = Scheduler(scheduler.engine, ByteTokenizer(), most_rows=1, most_waiting=2)
    block = threading.Event()
    held = Request(list(b"a"), GenerateOptions(max_new_tokens=80), lambda event: block.wait(20) and None)
    small.submit(held)
    with pytest.raises(FullError, match="2 requests are waiting already"):
        for _ in range(5):
            small.submit(Request(list(b"b"), GenerateOptions(max_new_tokens=2), lambda event: None))
    block.set()
    small.close(timeout=20)
    with pytest.raises(FullError, match="shutting down"):
        small.submit(held)


def test_an_engine_that_fails_ends_its_sequences_and_goes_on(
    served_model: FullBandModel, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    real = scheduler.engine.step

    def failing(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("out of something")
        return real(*arguments)

    monkeypatch.setattr(scheduler.engine, "step", failing)
    events = [ask(scheduler, prompt, max_new_tokens=20)[1] for prompt in (b"abc", b"de")]
    for heard in events:
        while (event := heard.get(timeout=20)).error is None:
            pass
        assert event.error == "RuntimeError in the model; the server's log has more"
    again = ask(scheduler, b"abc", max_new_tokens=20)[1]
    assert answer(again)[0][0] == generate_texts(served_model, ByteTokenizer(), [list(b"abc")], max_new_tokens=20)[0].text


def test_a_listener_that_fails_leaves(served_model: FullBandModel, scheduler: Scheduler) -> None:
    def deaf(event: Event) -> None:
        raise RuntimeError("the loop is closed")

    scheduler.submit(Request(list(b"gone"), GenerateOptions(max_new_tokens=60), deaf))
    _, events = ask(scheduler, b"stays", max_new_tokens=30)
    assert answer(events)[0][0] == generate_texts(served_model, ByteTokenizer(), [list(b"stays")], max_new_tokens=30)[0].text
    settle(scheduler)


def test_a_short_prompt_does_not_wait_for_one_that_takes_long(served_model: FullBandModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it change what the long one is answered, or that a short one which is cancelled leaves."""
    parts: list[int] = []
    engine = LocalEngine(served_model, chunk=16)
    made, run = Scheduler(engine, ByteTokenizer(), most_rows=4), engine.prefill

    def counted(*given: Any) -> Any:
        for part in run(*given):
            parts.append(len(given[0][0]))
            time.sleep(0.005)
            yield part

    monkeypatch.setattr(engine, "prefill", counted)
    long, short = bytes(range(97, 117)) * 3, b"short"
    heard = [ask(made, long, mode="fused", feedback_passes="exact", max_new_tokens=3, stop_ids=())[1] for _ in range(2)]
    gone, _ = ask(made, b"goes", max_new_tokens=30)
    made.cancel(gone)
    found = answer(ask(made, short, max_new_tokens=3, stop_ids=())[1])
    assert len(parts) < 60, "the first long one alone takes 61"
    assert found[0][1] == generate_texts(served_model, ByteTokenizer(), [list(short)], max_new_tokens=3, stop_ids=())[0].tokens
    expected = generate_texts(served_model, ByteTokenizer(), [list(long)], "fused", "exact", max_new_tokens=3, stop_ids=())[0].tokens
    assert [answer(events)[0][1] for events in heard] == [expected] * 2
    settle(made)
    assert not made._entering
    made.close(timeout=20)
