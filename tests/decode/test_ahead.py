"""Reading ahead, rebuilt caches, scores and self-speculation, against decoding step by step."""

import pytest
import torch

from decode.cases import CONTEXT, VOCABULARY, WINDOW, random_prompts
from fullband.decode import collect, generate, prefill, resolve_mode, step, stream
from fullband.decode.ahead import rebuild_cache, run_ahead
from fullband.decode.prefill import prefill_converged
from fullband.decode.prompts import align_prompts
from fullband.decode.speculate import LookAhead, PromptLookup, Speculation, SpeculationReport

MODES = ["standard", "soft", "fused"]


@pytest.fixture
def model(isometric_model):
    """Feedback that contracts, a window, three layers; sharp logits."""
    model = isometric_model("residual", vocab_size=VOCABULARY, window=WINDOW, context=4 * CONTEXT)
    with torch.no_grad():
        model.connection.mergers[0].state.weight.mul_(0.4)
    return model


def stepped(model, prompt, continuation, mode):
    """The reference: one step a token; (states behind every token, last decode state)."""
    resolved = resolve_mode(mode)
    state = prefill(model, [prompt], resolved.feedback_passes)
    states = [state.top_BD]
    for token in continuation:
        state = step(model, state, torch.tensor([token]), resolved)
        states.append(state.top_BD)
    return torch.cat(states), state


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lengths", [[9, 9], [3, 11]])
def test_pass_n_makes_the_first_n_tokens_exact(model, mode, lengths):
    prompts, ahead_tokens = random_prompts(lengths), torch.tensor(random_prompts([8, 8], seed=1))
    state = prefill(model, prompts, resolve_mode(mode).feedback_passes)
    exact = [stepped(model, p, t, mode)[0][1:] for p, t in zip(prompts, ahead_tokens.tolist(), strict=True)]
    passes = 0
    for ahead in run_ahead(model, state, ahead_tokens, resolve_mode(mode)):
        passes += 1
        final = 8 if mode == "standard" else passes
        for row in range(2):
            assert (ahead.states_BSD[row, :final] - exact[row][:final]).abs().max() < 1e-10
            assert not ahead.change_BS[row, :final].any()
    assert passes == (1 if mode == "standard" else 8)


@pytest.mark.parametrize("mode", MODES)
def test_rebuilt_cache_equals_the_decoded_one(model, mode):
    prompt, continuation = random_prompts([10, 20])
    states, last = stepped(model, prompt, continuation, mode)
    rebuilt = rebuild_cache(model, prompt, continuation, mode)
    assert float(rebuilt.residual_B) == 0
    assert (rebuilt.state.top_BD - last.top_BD).abs().max() < 1e-10
    assert (rebuilt.states[0][len(prompt) - 1 :] - states).abs().max() < 1e-10
    assert rebuilt.state.positions_B.tolist() == last.positions_B.tolist() == [30]
    for ours, theirs in zip(rebuilt.state.cache.layers, last.cache.layers, strict=True):
        assert ours.tensor.shape == theirs.tensor.shape
        assert (ours.tensor - theirs.tensor).abs().max() < 1e-10
    token = torch.tensor([3])
    again = step(model, rebuilt.state, token, resolve_mode(mode)).top_BD - step(model, last, token, resolve_mode(mode)).top_BD
    assert again.abs().max() < 1e-10


def test_the_residual_says_how_far_few_passes_are(model):
    prompt, continuation = random_prompts([10, 30])
    _, last = stepped(model, prompt, continuation, "soft")
    errors, residuals = [], []
    for passes in (2, 4, 8):
        rebuilt = rebuild_cache(model, prompt, continuation, passes=passes)
        errors.append(float((rebuilt.state.top_BD - last.top_BD).norm() / last.top_BD.norm()))
        residuals.append(float(rebuilt.residual_B))
    assert residuals[0] > residuals[1] > residuals[2] > 0
    assert all(error < 2 * residual for error, residual in zip(errors, residuals, strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(dict(passes=0), "at least 1 pass"), (dict(continuation=[]), "continuation is empty"), (dict(continuation=[1] * 400), "do not fit")],
)
def test_bad_rebuilds_are_refused(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        rebuild_cache(model, **({"prompt": [1, 2], "continuation": [3]} | arguments))


@pytest.mark.parametrize("lengths", [[40], [5, 31, 18], [12, 12]])
def test_converged_prefill_continues_like_exact_prefill(model, lengths):
    prompts = random_prompts(lengths)
    converged, _, report = prefill_converged(model, align_prompts(model.trunk, prompts), tolerance=1e-9)
    exact = prefill(model, prompts, "exact")
    assert (report.residual_B < 1e-9).all()
    for token in (1, 2, 3, 4, 5, 6, 7, 8):
        assert (converged.top_BD - exact.top_BD).abs().max() < 1e-7
        tokens = torch.full((len(prompts),), token)
        converged, exact = (step(model, s, tokens, resolve_mode("fused")) for s in (converged, exact))
    for ours, theirs in zip(converged.cache.layers, exact.cache.layers, strict=True):
        assert ours.tensor.shape == theirs.tensor.shape, "sliding layers forget alike"


# Self-speculation


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("settings", [Speculation(8, 4, 1e-6), Speculation(5, 8, 0.0)])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.9, "n": 2}])
def test_speculation_makes_the_text_of_plain_decoding(model, mode, settings, sampling):
    prompts = [random_prompts([6])[0] * 3, *random_prompts([11], seed=1)]
    expected = generate(model, prompts, mode, max_new_tokens=50, **sampling)
    made = stream(model, prompts, mode, max_new_tokens=50, speculation=settings, **sampling)
    assert collect(made) == expected
    report = made.speculation_report
    assert report.checks and 0 <= report.kept <= report.drafted


def test_speculation_stops_and_slides_like_plain_decoding(model):
    prompts = random_prompts([30, 9])
    for settings in ({"stop_ids": [3, 4, 5], "temperature": 1.5}, {"overflow": "slide", "repetition_penalty": 1.2}):
        settings = {"max_new_tokens": 4 * CONTEXT, "overflow": "slide"} | settings
        assert generate(model, prompts, speculation=Speculation(tolerance=0.0), **settings) == generate(model, prompts, **settings)


def test_speculation_needs_fewer_passes_than_steps_on_text_that_repeats_itself(model):
    made = stream(model, [random_prompts([5])[0] * 4], "standard", max_new_tokens=150, speculation=Speculation())
    collect(made)
    assert made.speculation_report.acceptance_length > 2, "greedy decoding of a small model falls into a cycle, which lookup finds"
    assert made.speculation_report.passes < 90


def test_states_of_speculation_are_those_of_stepping(model):
    prompt, mode = random_prompts([6])[0] * 3, resolve_mode("soft")
    text = generate(model, [prompt], max_new_tokens=60)[0].tokens
    report = SpeculationReport()
    ahead = LookAhead(model, mode, Speculation(8, 4, 1e-4), prompt, report)
    plain = fast = prefill(model, [prompt])
    for number, token in enumerate(text):
        if number == 40:
            token = 7  # not what the model would say: the draft is thrown away
        plain, fast = step(model, plain, torch.tensor([token]), mode), ahead.feed(fast, token)
        assert (plain.top_BD - fast.top_BD).norm() < 1e-3 * plain.top_BD.norm()
        assert fast.cache.length == int(fast.positions_B) == int(plain.positions_B)
    assert report.kept > 0


def test_an_unconfirmed_draft_is_never_used(model):
    """With one pass and no tolerance only the first token of a block is exact, so no draft can be kept."""
    made = stream(model, [random_prompts([5])[0] * 4], "soft", max_new_tokens=50, speculation=Speculation(8, 1, 0.0))
    collect(made)
    assert made.speculation_report.drafted > 0 and made.speculation_report.kept == 0


def test_lookup_finds_what_followed_and_goes_round():
    lookup = PromptLookup([1, 2, 3, 9, 1, 2])
    assert lookup.draft(3) == [3, 9, 1]
    lookup.append(3)
    assert lookup.draft(2) == [9, 1]
    assert PromptLookup([4, 4, 4]).draft(4) == [4, 4, 4, 4]
    assert PromptLookup([1, 2, 3]).draft(4) == []


def test_lookup_prefers_the_longest_match():
    assert PromptLookup([1, 2, 3, 7, 5, 3, 8, 1, 2, 3]).draft(1) == [7]


def test_speculation_is_for_one_row(model):
    state = prefill(model, random_prompts([4, 4]))
    with pytest.raises(ValueError, match="one row at a time"):
        LookAhead(model, resolve_mode("soft"), Speculation(), [1], SpeculationReport()).feed(state, 1)
    with pytest.raises(ValueError, match="at least 1"):
        Speculation(draft_length=0)
