"""Law 11 (Eqs. 2 and 7, Fig. 1): which past states h_{t'}^{l'} can move h_t^l, read off autograd Jacobians."""

import pytest
import torch

from reference.seam import embed, fused_pass, read, run_trunk

T, L = 5, 3


@pytest.fixture
def reached(isometric_model):
    """compute(model, tokens) -> bool [T, L, T, L]: whether h_t^l depends on what is added to h_{t'}^{l'}, the output of block l' at t'.

    A hook adds a zero leaf to every block's output; positions are counted as they pass, so position-by-position reading works too.
    """

    def jacobian(compute):
        model = isometric_model(layers=L, full_every=1)
        nudges = torch.zeros(L, T, 16, dtype=torch.float64, requires_grad=True)
        outputs: list[list[torch.Tensor]] = [[] for _ in range(L)]

        def hook(layer):
            def nudge(_, __, result):
                x, new = result
                done = sum(part.shape[1] for part in outputs[layer]) % T
                x = x + nudges[layer, done : done + x.shape[1]]
                outputs[layer].append(x)
                return x, new

            return nudge

        for layer, block in enumerate(model.trunk.blocks):
            block.register_forward_hook(hook(layer))
        compute(model, torch.randint(23, (1, T)))
        latest = torch.stack([torch.cat(parts, 1)[0, -T:] for parts in outputs])  # of the last pass
        found = torch.zeros(T, L, T, L, dtype=torch.bool)
        for t in range(T):
            for layer in range(L):
                weight = torch.linspace(1, 2, 16, dtype=torch.float64)
                (gradient,) = torch.autograd.grad((latest[layer, t] * weight).sum(), nudges, retain_graph=True, allow_unused=True)
                found[t, layer] = gradient.abs().amax(-1).T > 0
        return found

    return jacobian


def expected(rule):
    return torch.tensor([[[[rule(t, l, s, m) for m in range(L)] for s in range(T)] for l in range(L)] for t in range(T)])


def past(found):
    """Only pairs t' < t: the column above a state itself is nobody's question."""
    before = torch.ones(T, T, dtype=torch.bool).tril(-1)
    return found & before[:, None, :, None]


def test_standard_reads_lower_layers_of_the_past_only(reached):
    found = reached(lambda model, tokens: read(model, tokens, 0))
    assert torch.equal(past(found), past(expected(lambda t, l, s, m: m < l)))


def test_exact_feedback_reads_every_layer_of_the_past(reached):
    found = reached(lambda model, tokens: read(model, tokens, "exact"))
    assert torch.equal(past(found), past(expected(lambda t, l, s, m: True)))


def test_soft_reads_every_layer_of_the_past_behind_a_plain_prompt(reached):
    prompt = 3

    def soft(model, tokens):
        e = embed(model.trunk, tokens)
        states, cache = run_trunk(model.trunk, e[:, :prompt], None, None, None, "all")
        top = states[:, -1]
        for t in range(prompt, T):
            states, cache = fused_pass(model, e[:, t : t + 1], e[:, t : t + 1], top, cache=cache, keep="all")
            top = states[:, -1]

    def rule(t, l, s, m):
        if t < prompt:
            return m < l
        return m < L - 1 or s >= prompt - 1  # through the top state of the prompt's last position; earlier top states are never fed back

    assert torch.equal(past(reached(soft)), past(expected(rule)))


def test_feedback_never_reads_the_future(reached):
    for passes in (0, "exact"):
        found = reached(lambda model, tokens, passes=passes: read(model, tokens, passes))
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        assert not (found & future[:, None, :, None]).any()
