"""Reading ahead, rebuilt caches, scores and self-speculation, against decoding step by step."""

from itertools import islice

import pytest
import torch

from decode.cases import CONTEXT, VOCABULARY, WINDOW, random_prompts
from fullband.decode import generate, prefill, resolve_mode, step
from fullband.decode.ahead import read_ahead, rebuild_cache, score
from fullband.decode.prefill import prefill_converged
from fullband.decode.prompts import align_prompts
from fullband.decode.speculate import PromptLookup, Speculation, SpeculationReport, speculate

MODES = ["standard", "soft", "fused"]


@pytest.fixture
def model(isometric_model):
    """Feedback that contracts, a window, three layers; sharp logits."""
    model = isometric_model("residual", vocab_size=VOCABULARY, window=WINDOW, context=8 * CONTEXT)
    with torch.no_grad():
        model.fusion.state.weight.mul_(0.4)
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
    for ahead in read_ahead(model, state, ahead_tokens, resolve_mode(mode)):
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
    rebuilt = rebuild_cache(model, prompt, continuation, mode, passes=20)
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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [1, 12])
def test_score_is_the_log_probability_of_stepping(model, mode, count):
    prompt, continuation = random_prompts([7, count])
    states, _ = stepped(model, prompt, continuation, mode)
    expected = model.logits(states[:-1]).log_softmax(-1)[range(count), continuation]
    scores, residual = score(model, prompt, continuation, mode, passes=20)
    assert residual == 0
    assert (scores - expected).abs().max() < 1e-5  # log-probabilities are float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(dict(passes=0), "at least 1 pass"), (dict(continuation=[]), "no continuation"), (dict(continuation=[1] * 400), "do not fit")],
)
def test_bad_rebuilds_are_refused(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        rebuild_cache(model, **({"prompt": [1, 2], "continuation": [3]} | arguments))


@pytest.mark.parametrize("lengths", [[40], [5, 31, 18], [12, 12]])
def test_converged_prefill_continues_like_exact_prefill(model, lengths):
    prompts = random_prompts(lengths)
    converged, report = prefill_converged(model, align_prompts(model.trunk, prompts), tolerance=1e-9)
    exact = prefill(model, prompts, "exact")
    assert (report.residual_B < 1e-9).all()
    for token in (1, 2, 3, 4, 5, 6, 7, 8):
        assert (converged.top_BD - exact.top_BD).abs().max() < 1e-7
        tokens = torch.full((len(prompts),), token)
        converged, exact = (step(model, s, tokens, resolve_mode("fused")) for s in (converged, exact))
    for ours, theirs in zip(converged.cache.layers, exact.cache.layers, strict=True):
        assert ours.tensor.shape == theirs.tensor.shape, "sliding layers forget alike"


# Self-speculation


def greedy(logits, first):
    return logits.argmax(-1).tolist()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("settings", [Speculation(8, 4, 1e-6), Speculation(3, 1, 0.0), Speculation(5, 8, 0.0)])
@pytest.mark.parametrize("seed", range(3))
def test_greedy_speculation_equals_plain_decoding(model, mode, settings, seed):
    prompt = random_prompts([6], seed)[0] * 3
    resolved, report = resolve_mode(mode), SpeculationReport()
    expected = generate(model, [prompt], mode, max_new_tokens=120)[0].tokens
    made = speculate(model, prefill(model, [prompt], resolved.feedback_passes), prompt, resolved, greedy, settings, report)
    pairs = list(islice(made, 120))
    state = pairs[-1][1]
    assert [token for token, _ in pairs] == expected
    assert report.checks and sum(report.accepted.values()) == report.checks
    assert state.cache.length == int(state.positions_B)


def test_speculation_needs_fewer_passes_than_steps_on_text_that_repeats_itself(model):
    prompt, mode, report = random_prompts([5])[0] * 4, resolve_mode("standard"), SpeculationReport()
    made = speculate(model, prefill(model, [prompt]), prompt, mode, greedy, Speculation(8, 4), report)
    for _ in zip(range(200), made, strict=False):
        pass
    assert report.acceptance_length > 2, "greedy decoding of a small model falls into a cycle, which lookup finds"
    assert report.passes < 120


def test_sampled_speculation_draws_what_plain_decoding_draws(model):
    """A choice that depends on (logits, number of the token) alone is the same with and without drafts."""
    prompt, mode = random_prompts([6])[0] * 3, resolve_mode("soft")

    def choose(logits, first):
        uniforms = torch.tensor([hash((first + i, 7)) % 1000 / 1000 for i in range(len(logits))], dtype=logits.dtype)
        return (logits.mul(3).softmax(-1).cumsum(-1) < uniforms[:, None]).sum(-1).clamp(max=VOCABULARY - 1).tolist()

    made = speculate(model, prefill(model, [prompt]), prompt, mode, choose, Speculation(6, 6, 0.0), SpeculationReport())
    tokens = [token for _, (token, _) in zip(range(100), made, strict=False)]
    state, expected = prefill(model, [prompt]), []
    for number in range(100):
        expected += choose(model.logits(state.top_BD), number)
        state = step(model, state, torch.tensor(expected[-1:]), mode)
    assert tokens == expected


def test_a_wrong_draft_is_never_kept(model):
    prompt, report = list(range(20)) + list(range(5)), SpeculationReport()
    made = speculate(model, prefill(model, [prompt]), prompt, resolve_mode("soft"), greedy, Speculation(8, 2, 1e9), report)
    tokens = [token for _, (token, _) in zip(range(30), made, strict=False)]
    assert len(tokens) == 30 and max(report.accepted) <= 8


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
        next(speculate(model, state, [1], resolve_mode("soft"), greedy, Speculation(), SpeculationReport()))
    with pytest.raises(ValueError, match="at least 1"):
        Speculation(draft_length=0)
