"""Reading a prompt with its answer: as generation in Soft made it."""

import pytest
import torch

from fullband.decode import generate
from fullband.decode.ahead import score
from fullband.feedback.answer import read_answer
from fullband.feedback.passes import read


def test_exact_reading_scores_a_generated_answer_as_decoding_did(isometric_model):
    model = isometric_model()
    prompt = [3, 1, 4, 1, 5]
    answer = generate(model, [prompt], "soft", max_new_tokens=9)[0].tokens
    states = read_answer(model, torch.tensor([prompt + answer]), len(prompt))
    assert model.logits(states)[0, len(prompt) - 1 : -1].argmax(dim=-1).tolist() == answer
    expected, residual = score(model, prompt, answer, passes=len(answer))
    found = model.logits(states)[0, len(prompt) - 1 : -1].log_softmax(dim=-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
    assert residual == 0
    torch.testing.assert_close(found, expected.to(found.dtype), atol=1e-6, rtol=0)


def test_passes_reach_the_exact_answer_one_position_each_and_the_prompt_stays_plain(isometric_model):
    model = isometric_model()
    tokens, prompt = torch.arange(24).view(2, 12) % 23, 4
    exact = read_answer(model, tokens, prompt)
    plain = read(model, tokens, 0)
    torch.testing.assert_close(exact[:, :prompt], plain[:, :prompt], atol=1e-10, rtol=0)
    assert (exact[:, prompt:] - plain[:, prompt:]).abs().amin(dim=-1).min() > 0
    for passes in range(1, 9):
        near = read_answer(model, tokens, prompt, passes)
        torch.testing.assert_close(near[:, : prompt + passes], exact[:, : prompt + passes], atol=1e-10, rtol=0)
        if passes < 8:
            assert (near[:, prompt + passes] - exact[:, prompt + passes]).abs().max() > 1e-8
    torch.testing.assert_close(read_answer(model, tokens, prompt, 0), plain, atol=0, rtol=0)


def test_the_exact_reading_and_enough_passes_have_the_same_gradients(isometric_model):
    model = isometric_model()
    tokens = torch.arange(20).view(2, 10)

    def gradients(passes):
        model.zero_grad()
        read_answer(model, tokens, 3, passes)[:, 3:].square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for a, b in zip(gradients("exact"), gradients(7), strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("prompt", [0, 10])
def test_a_prompt_leaves_an_answer(isometric_model, prompt):
    with pytest.raises(ValueError, match="the prompt is 1 … 9 of 10 slots"):
        read_answer(isometric_model(), torch.zeros(1, 10, dtype=torch.long), prompt)


def test_converged_is_refused(isometric_model):
    with pytest.raises(ValueError, match="not 'converged'"):
        read_answer(isometric_model(), torch.zeros(1, 10, dtype=torch.long), 4, "converged")
