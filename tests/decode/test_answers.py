"""Log-probabilities of sampled answers: those of decoding, position by position and in parallel passes, with their gradients."""

import pytest
import torch

from decode.cases import CONTEXT, VOCABULARY, WINDOW, random_prompts
from fullband.decode import answer_logprobs, prefill, resolve_mode, step
from fullband.feedback.by_passes import top_states
from fullband.layout import Layout
from reference.decoding import reference_tops

WAYS = [("standard", None), ("soft", None), ("fused", 1), ("fused", 2), ("fused", "exact")]
LENGTHS = [[7, 7, 7], [3, 11, 6]]  # without padding, and with


@pytest.fixture
def model(isometric_model):
    return isometric_model(vocab_size=VOCABULARY, window=WINDOW, context=CONTEXT)


def sampled(lengths, answers=(9, 1, 14)):
    return random_prompts(lengths), random_prompts(list(answers), seed=1)


def stepped(model, prompt, answer, mode, passes):
    """The slow twin: one step a token."""
    resolved = resolve_mode(mode, passes)
    state = prefill(model, [prompt], resolved.feedback_passes)
    found = []
    for token in answer:
        found.append(model.trunk.head(state.top_BD)[0].log_softmax(-1)[token])
        state = step(model, state, torch.tensor([token]), resolved)
    return torch.stack(found)


@torch.no_grad()
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("mode", "passes"), [*WAYS, ("fused", "converged")])
def test_they_are_those_of_decoding(model, mode, passes, lengths):
    prompts, answers = sampled(lengths)
    found = answer_logprobs(model, prompts, answers, mode, passes, batch_rows=2)["exact"]
    for prompt, answer, own in zip(prompts, answers, found, strict=True):
        torch.testing.assert_close(own, stepped(model, prompt, answer, mode, passes), atol=1e-10, rtol=0)


@torch.no_grad()
def test_and_those_of_whole_rows_run_anew_for_every_token(model):
    prompts, answers = sampled([3, 11, 6])
    for prompt, answer, own in zip(prompts, answers, answer_logprobs(model, prompts, answers)["exact"], strict=True):
        tops = torch.stack(reference_tops(model, prompt, answer[:-1], 0, True))
        expected = model.trunk.head(tops).log_softmax(-1)[range(len(answer)), answer]
        torch.testing.assert_close(own, expected, atol=1e-10, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("mode", "passes"), WAYS)
def test_k_passes_make_the_first_k_and_one_tokens_exact(model, mode, passes, lengths):
    prompts, answers = sampled(lengths)
    found = answer_logprobs(model, prompts, answers, mode, passes, [0, 1, 4, 13, "exact"])
    for count in (0, 1, 4, 13):
        for own, exact in zip(found[count], found["exact"], strict=True):
            torch.testing.assert_close(own[: count + 1], exact[: count + 1], atol=1e-10, rtol=0)
    apart = [float((own - exact).abs().max()) for own, exact in zip(found[1], found["exact"], strict=True)]
    assert (max(apart) == 0) if mode == "standard" else (max(apart) > 1e-3), "what too few passes leave out would show"
    assert apart[1] == 0, "an answer of one token needs no pass"


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("mode", "passes"), WAYS)
def test_gradients_are_those_of_the_sequential_recurrence(model, mode, passes, lengths):
    prompts, answers = sampled(lengths)
    weights = torch.linspace(-1, 1, sum(map(len, answers)), dtype=torch.float64)

    def gradients(answer_passes):
        found = torch.cat(answer_logprobs(model, prompts, answers, mode, passes, [answer_passes])[answer_passes])
        return torch.autograd.grad((found * weights).sum(), list(model.parameters()), allow_unused=True)

    exact = gradients("exact")
    assert sum(gradient is not None and bool(gradient.any()) for gradient in exact) > len(exact) // 2
    for own, expected in zip(gradients(13), exact, strict=True):
        torch.testing.assert_close(*(torch.zeros(()).double() if g is None else g for g in (own, expected)), atol=1e-10, rtol=0)
    if mode != "standard":
        assert any(own is not None and (own - expected).abs().max() > 1e-6 for own, expected in zip(gradients(1), exact, strict=True))


def test_gradients_are_those_of_whole_rows(model):
    """Soft through another path: prompt and answer in whole passes, of which the prompt stays without feedback."""
    prompts, answers = random_prompts([6, 6]), random_prompts([8, 8], seed=1)
    rows = torch.tensor([prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
    plain = (torch.arange(13) < 6).expand(2, -1)
    logits = model.trunk.head(top_states(model, rows[:, :-1], 7, Layout(plain_BT=plain))[:, 5:])
    expected = logits.log_softmax(-1).gather(2, rows[:, 6:, None]).sum()
    own = torch.stack(answer_logprobs(model, prompts, answers, answer_passes=[7])[7]).sum()
    torch.testing.assert_close(own, expected, atol=1e-10, rtol=0)
    parameters = list(model.parameters())
    for ours, theirs in zip(torch.autograd.grad(own, parameters), torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)


@torch.no_grad()
def test_a_temperature_divides_the_logits(model):
    prompts, answers = sampled([3, 11, 6])
    state = prefill(model, [prompts[1]])
    expected = (model.trunk.head(state.top_BD)[0] / 0.5).log_softmax(-1)[answers[1][0]]
    assert float(answer_logprobs(model, prompts, answers, temperature=0.5)["exact"][1]) == pytest.approx(float(expected), abs=1e-10)


def test_an_answer_that_fills_the_context_beside_a_longer_prompt(model):
    prompts, answers = random_prompts([2, CONTEXT - 3]), random_prompts([CONTEXT - 2, 3], seed=2)
    with torch.no_grad():
        for prompt, answer, own in zip(prompts, answers, answer_logprobs(model, prompts, answers)["exact"], strict=True):
            torch.testing.assert_close(own[-3:], alone(model, prompt, answer)[-3:], atol=1e-10, rtol=0)


def alone(model, prompt, answer):
    return answer_logprobs(model, [prompt], [answer])["exact"][0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"answers": [[]]}, "answer 0 is empty"),
        ({"answers": [[1] * CONTEXT]}, "do not fit"),
        ({"answers": [[VOCABULARY]]}, "outside"),
        ({"answers": [[1], [2]]}, "2 answers and 1 prompts"),
        ({"answer_passes": ["converged"]}, "not 'converged'"),
        ({"answer_passes": [-1]}, "feedback_passes is 0"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"mode": "sofd"}, "unknown mode"),
    ],
)
def test_what_cannot_be_scored_is_refused(model, given, message):
    with pytest.raises(ValueError, match=message):
        answer_logprobs(model, **({"prompts": [[1, 2]], "answers": [[3, 4]]} | given))
