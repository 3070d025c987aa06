"""Reading prompts plainly and what follows fused, as generation in Soft made it. What is plain in all rows is computed once."""

import pytest
import torch

from fullband.decode import generate
from fullband.decode.answers import answer_logprobs
from reference.seam import lengths_run, read


def plain(prompts: list[int], length: int) -> torch.Tensor:
    return torch.arange(length)[None] < torch.tensor(prompts)[:, None]


def test_exact_reading_scores_a_generated_answer_as_decoding_did(isometric_model):
    model = isometric_model()
    prompt = [3, 1, 4, 1, 5]
    answer = generate(model, [prompt], "soft", max_new_tokens=9)[0].tokens
    states = read(model, torch.tensor([prompt + answer]), "exact", plain_BT=plain([5], 14))
    assert model.trunk.head(states)[0, len(prompt) - 1 : -1].argmax(dim=-1).tolist() == answer
    (expected,) = answer_logprobs(model, [prompt], [answer])["exact"]
    found = model.trunk.head(states)[0, len(prompt) - 1 : -1].log_softmax(dim=-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
    torch.testing.assert_close(found, expected.to(found.dtype), atol=1e-6, rtol=0)


def test_passes_reach_the_exact_answer_one_position_each_and_the_prompt_stays_plain(isometric_model):
    model = isometric_model()
    tokens, prompt = torch.arange(24).view(2, 12) % 23, 4
    where = plain([prompt, prompt], 12)
    exact = read(model, tokens, "exact", plain_BT=where)
    unfed = read(model, tokens, 0)
    torch.testing.assert_close(exact[:, :prompt], unfed[:, :prompt], atol=1e-10, rtol=0)
    assert (exact[:, prompt:] - unfed[:, prompt:]).abs().amin(dim=-1).min() > 0
    for passes in range(1, 9):
        near = read(model, tokens, passes, plain_BT=where)
        torch.testing.assert_close(near[:, : prompt + passes], exact[:, : prompt + passes], atol=1e-10, rtol=0)
        if passes < 8:
            assert (near[:, prompt + passes] - exact[:, prompt + passes]).abs().max() > 1e-8
    torch.testing.assert_close(read(model, tokens, 0, plain_BT=where), unfed, atol=1e-10, rtol=0)


@pytest.mark.parametrize("passes", [0, 1, 3, "exact"])
@pytest.mark.parametrize("prompts", [[3, 3, 3], [7, 4, 9], [0, 5, 6], [14, 13, 14], [14, 14, 14], [1, 2, 1]], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_a_head_that_is_computed_once_changes_nothing(isometric_model, packed_rows, passes, prompts, packed):
    """Outputs and gradients against every pass over whole rows, packed documents and padding on either side included."""
    model, rows = isometric_model(), packed_rows([[5, 7, 2], [14], [-3, 4, 7]])
    place = (rows.positions, rows.documents) if packed else (None, None)
    found = []
    for model.trunk.supports_prefix_reuse in (True, False):
        model.zero_grad()
        states = read(model, rows.tokens, passes, *place, plain_BT=plain(prompts, 14))
        held = states[rows.documents >= 0] if packed else states
        held.square().mul(torch.arange(held.shape[-1])).sum().backward()
        found.append([held.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for once, again in zip(*found, strict=True):
        torch.testing.assert_close(once, again, atol=1e-9, rtol=1e-9)


def test_the_head_is_computed_once(isometric_model):
    model, tokens = isometric_model(), torch.zeros(2, 12, dtype=torch.long)
    seen = lengths_run(model.trunk)
    read(model, tokens, 3, plain_BT=plain([5, 8], 12))
    assert seen == [5, 7, 7, 7, 7]
    seen.clear()
    read(model, tokens, "exact", plain_BT=plain([5, 8], 12))
    assert seen == [5, *[1] * 7]


def test_converged_is_refused(isometric_model):
    with pytest.raises(ValueError, match="'converged' takes no prompts without feedback"):
        read(isometric_model(), torch.zeros(1, 10, dtype=torch.long), "converged", plain_BT=plain([4], 10))
