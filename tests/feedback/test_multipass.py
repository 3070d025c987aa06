"""Law 3: prefix reuse gives the loss and every gradient of the naive K passes."""

from dataclasses import dataclass

import pytest
import torch

from fullband.feedback.loss import IGNORE, multipass_loss, token_losses_reference
from fullband.feedback.multipass import Jitter, PassStates, multipass, multipass_reference
from fullband.layout import Layout
from reference.seam import embed, fused_pass, lengths_run, run_trunk

T = 24  # the window is 5: more than four of them
PACKED = [[9, 12, 3], [24], [4, 4, 4, 12], [-5, 11, 8]]
PREFIXES = {
    "K=1": [],
    "K=2, p=0": [0],
    "K=2, p=T-2": [T - 2],
    "K=2": [7],
    "K=3, p2 < p3": [4, 13],
    "K=3, p2 > p3": [13, 4],
    "K=3, p2 = p3": [9, 9],
    "K=3, ends": [0, T - 2],
    "K=3, ends swapped": [T - 2, 0],
    "K=4": [6, 15, 2],
    "per row": [torch.tensor([3, 17, 8, 22]), torch.tensor([10, 0, 8, 5])],
    "per row and shared": [torch.tensor([3, 17, 8, 22]), 6, torch.tensor([10, 12, 8, 7])],
}


@dataclass(frozen=True)
class Condition:
    packed: bool = False
    jitter: bool = False
    checkpointing: bool = False
    masked: bool = False
    z_loss: float = 0.0
    fusion: str = "gated"


CONDITIONS = {
    "plain": Condition(),
    "packed": Condition(packed=True),
    "jitter": Condition(jitter=True),
    "uneven labels": Condition(masked=True, z_loss=0.1),
    "everything": Condition(packed=True, jitter=True, checkpointing=True, masked=True, z_loss=0.1),
}


def evaluate(model, rows, condition, compute, prefixes, **options):
    """(objective, gradients by name, per-pass sums) of one computation."""
    model.trunk.activation_checkpointing = condition.checkpointing
    layout = Layout(rows.positions, rows.documents) if condition.packed else Layout()
    jitter = Jitter(0.1, seed=3, step=11, rows=torch.arange(len(rows.tokens))) if condition.jitter else None
    targets = rows.targets if condition.masked else rows.targets.clamp(min=0)
    outputs = compute(model, rows.tokens, prefixes, layout, jitter, **options)
    loss = multipass_loss(
        outputs, model.trunk.head_weight, targets, float((targets != IGNORE).sum()), 0.7, condition.z_loss, chunk_logits=200
    )
    model.zero_grad()
    loss.objective.backward()
    return loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(fast, slow):
    torch.testing.assert_close(fast[0].objective, slow[0].objective, rtol=0, atol=1e-10)
    assert fast[1].keys() == slow[1].keys()
    for name, gradient in slow[1].items():
        torch.testing.assert_close(fast[1][name], gradient, rtol=0, atol=1e-10, msg=lambda m, n=name: f"gradient of {n}: {m}")
    for ours, theirs in zip(fast[0].passes, slow[0].passes, strict=True):
        for field in ("total", "count", "fused", "fused_count", "plain_there"):
            torch.testing.assert_close(getattr(ours, field), getattr(theirs, field), rtol=0, atol=1e-9)


@pytest.mark.parametrize("prefixes", PREFIXES.values(), ids=PREFIXES)
@pytest.mark.parametrize("condition", CONDITIONS.values(), ids=CONDITIONS)
def test_law_3_reuse_equals_the_naive_passes(isometric_model, packed_rows, prefixes, condition):
    model, rows = isometric_model(condition.fusion), packed_rows(PACKED)
    slow = evaluate(model, rows, condition, multipass_reference, prefixes)
    for pieces in (False, True):
        assert_same(evaluate(model, rows, condition, multipass, prefixes, pieces=pieces), slow)
    if prefixes:
        assert all(slow[1][name].abs().max() > 1e-8 for name in ("connection.mergers.0.state.weight", "connection.mergers.0.gate.weight"))


@pytest.mark.parametrize("rounding", [5, 8])
@pytest.mark.parametrize("prefixes", [[7], [3, 13], [13, 4], [0, T - 2], [torch.tensor([9, 17, 8, 22]), 6]], ids=str)
def test_law_3_holds_where_the_starts_are_rounded(isometric_model, packed_rows, prefixes, rounding):
    """A compiled run starts its later passes at few places; the prefixes, and so every value and gradient, are as without."""
    model, rows, condition = isometric_model(), packed_rows(PACKED), CONDITIONS["everything"]
    slow = evaluate(model, rows, condition, multipass_reference, prefixes)
    for pieces in (False, True):
        assert_same(evaluate(model, rows, condition, multipass, prefixes, pieces=pieces, rounding=rounding), slow)
    starts = [output.start for output in multipass(model, rows.tokens, prefixes, rounding=rounding)[1:]]
    assert starts == [(int(torch.as_tensor(p).min()) + 1) // rounding * rounding for p in prefixes]


@pytest.mark.parametrize("rounding", [1, 3])
def test_a_mask_that_says_the_first_position_is_fused_counts_it_as_plain(isometric_model, packed_rows, rounding):
    """Nothing is fed to it. Its loss was left out and its count was not, so feedback seemed to gain what it does not."""
    model, rows = isometric_model(), packed_rows(PACKED)
    prefixes, condition = [torch.zeros(rows.tokens.shape, dtype=torch.bool)], Condition(packed=True)
    fast = evaluate(model, rows, condition, multipass, prefixes, rounding=rounding)
    assert_same(fast, evaluate(model, rows, condition, multipass_reference, prefixes))
    assert int(fast[0].passes[1].fused_count) == rows.tokens[:, 1:].numel()


@pytest.mark.parametrize("fusion", ["concat", "add", "residual"])
@pytest.mark.parametrize("control", ["none", "shuffled"])
def test_law_3_holds_for_every_fusion_and_control(isometric_model, packed_rows, fusion, control):
    model, rows = isometric_model(fusion), packed_rows(PACKED)
    model.connection.control = control
    condition = Condition(packed=True, jitter=True, masked=True)
    assert_same(
        evaluate(model, rows, condition, multipass, [4, 13]),
        evaluate(model, rows, condition, multipass_reference, [4, 13]),
    )


def test_the_objective_is_equation_12(isometric_model, packed_rows):
    """L_1 + λ/(K-1) (L_2 + … + L_K), each over all scored positions, from whole logits."""
    model, rows = isometric_model(), packed_rows(PACKED)
    condition, prefixes = Condition(packed=True, masked=True, z_loss=0.1), [4, 13, 0]
    loss, _ = evaluate(model, rows, condition, multipass, prefixes)
    scored = (rows.targets != IGNORE).sum()
    expected = 0.0
    for output in multipass_reference(model, rows.tokens, prefixes, Layout(rows.positions, rows.documents)):
        nll, square = token_losses_reference(output.states.flatten(0, 1), model.trunk.head_weight, rows.targets.flatten())
        expected = expected + (1.0 if output.k == 1 else 0.7 / 3) * (nll.sum() + 0.1 * square.sum()) / scored
        own = loss.passes[output.k - 1]
        torch.testing.assert_close(own.total, nll.sum().detach(), rtol=0, atol=1e-9)
        assert own.count == scored
        if output.k > 1:
            after = (torch.arange(T) > output.prefix).expand(rows.targets.shape)
            torch.testing.assert_close(own.fused, (nll.view(after.shape) * after).sum().detach(), rtol=0, atol=1e-9)
            assert own.fused_count == (after & (rows.targets != IGNORE)).sum()
    torch.testing.assert_close(loss.objective, expected, rtol=0, atol=1e-10)


def test_the_prefix_is_never_computed_again(isometric_model, packed_rows):
    model, rows = isometric_model(), packed_rows(PACKED)
    seen = lengths_run(model.trunk)
    multipass(model, rows.tokens, [15, 4])
    assert seen == [T, T - 16, T - 5]
    seen.clear()
    multipass(model, rows.tokens, [15, 4], pieces=True)
    assert seen == [5, 11, 8, T - 16, T - 5]


def prompts_and_answers(rows, seed=0):
    """True on the prompts of packed documents: each begins with one of its own length, and some documents are all prompt."""
    generator = torch.Generator().manual_seed(seed)
    plain = torch.ones_like(rows.tokens, dtype=torch.bool)
    for row, documents in enumerate(rows.documents):
        for document in documents[documents >= 0].unique():
            places = (documents == document).nonzero()[:, 0]
            prompt = int(torch.randint(1, len(places) + 1, (), generator=generator))
            plain[row, places[prompt:]] = False
    return plain


@pytest.mark.parametrize("condition", [CONDITIONS["packed"], CONDITIONS["everything"]], ids=["packed", "everything"])
@pytest.mark.parametrize("control", ["none", "shuffled"])
def test_law_3_holds_for_masks_of_plain_positions(isometric_model, packed_rows, condition, control):
    """K = 3 with prompts between the answers of packed rows, another mask in each pass, in both orders of their first fused position."""
    model, rows = isometric_model(), packed_rows(PACKED)
    model.connection.control = control
    early, late = prompts_and_answers(rows, 1), prompts_and_answers(rows, 4)
    late[:, :9] = True
    assert (~early).any(0).int().argmax() < (~late).any(0).int().argmax()
    for prefixes in ([early, early], [early, late], [late, early], [late, 5]):
        slow = evaluate(model, rows, condition, multipass_reference, prefixes)
        for pieces, rounding in ((False, 1), (True, 1), (False, 4)):
            assert_same(evaluate(model, rows, condition, multipass, prefixes, pieces=pieces, rounding=rounding), slow)
        assert slow[1]["connection.mergers.0.state.weight"].abs().max() > 1e-8


def test_a_mask_reuses_up_to_the_first_fused_position(isometric_model, packed_rows):
    model, rows = isometric_model(), packed_rows(PACKED)
    plain = prompts_and_answers(rows, 2)
    plain[:, :7] = True
    first = int((~plain).any(0).int().argmax())
    seen = lengths_run(model.trunk)
    outputs = multipass(model, rows.tokens, [plain, torch.ones_like(plain)], Layout(rows.positions, rows.documents))
    assert seen == [T, T - first, 1]
    torch.testing.assert_close(outputs[2].states, outputs[0].states[:, -1:], rtol=0, atol=1e-10)  # nothing fused: pass 1 again
    assert torch.equal(outputs[1].fused(T, "cpu"), ~plain)


def test_a_prompt_is_read_plainly_whatever_was_answered_before(isometric_model, packed_rows):
    """In a packed row the prompt behind another conversation's fused answer has pass 1's states: nothing crosses (laws 3 and 5)."""
    model, rows = isometric_model(), packed_rows(PACKED)
    plain = prompts_and_answers(rows, 3)
    prompt_only = plain & (plain.cumprod(1) == 0) & (rows.documents > 0)
    for compute in (multipass, multipass_reference):
        outputs = compute(model, rows.tokens, [plain, plain], Layout(rows.positions, rows.documents))
        for output in outputs[1:]:
            difference = (output.states - outputs[0].states[:, output.start :]).abs().amax(-1)
            assert difference[prompt_only[:, output.start :]].max() < 1e-10
            assert difference[~plain[:, output.start :]].max() > 1e-3


def test_a_mask_of_another_length_is_refused(isometric_model):
    model, tokens = isometric_model(), torch.zeros(2, 8, dtype=torch.long)
    for compute in (multipass, multipass_reference):
        with pytest.raises(ValueError, match="one entry a token: 5 for 8 tokens"):
            compute(model, tokens, [torch.ones(2, 5, dtype=torch.bool)])


def wrong(model, tokens, prefixes, layout, jitter, mistake):
    """Multi-pass with one of the mistakes that prefix reuse invites."""
    positions, documents = layout.positions_BT, layout.documents_BT
    embeddings = embed(model.trunk, tokens)
    plain, cache = run_trunk(model.trunk, embeddings, positions, documents, keep="all")
    outputs, previous, latest = [PassStates(1, 0, tokens.shape[1] - 1, plain)], plain, cache
    for k, p in enumerate(prefixes, start=2):
        start = p + 1
        keys = latest if mistake == "keys of pass k-1" and latest.length >= start else cache
        carried = plain if mistake == "carries pass 1" else previous
        states, later = fused_pass(
            model,
            embeddings[:, start:],
            carried[:, start:],
            plain[:, start - 1] if mistake == "boundary of pass 1" else carried[:, start - 1],
            None if positions is None else positions[:, start:],
            None if documents is None else documents[:, start:],
            keys.crop(start),
            keep="all",
            noise_BTD=jitter(k, 0 if mistake == "noise from 0" else start, tokens.shape[1], embeddings)[:, : tokens.shape[1] - start],
        )
        latest = later
        outputs.append(PassStates(k, start, p, states))
        previous = torch.cat([plain[:, :start], states], 1)
    return outputs


def test_mistakes_that_reuse_invites_are_measurable(isometric_model, packed_rows):
    """The mutations fail the comparison above by a wide margin, the unmutated copy passes it."""
    model, rows = isometric_model(), packed_rows(PACKED)
    condition, prefixes = Condition(packed=True, jitter=True, masked=True), [4, 13]
    slow = evaluate(model, rows, condition, multipass_reference, prefixes)
    assert_same(evaluate(model, rows, condition, wrong, prefixes, mistake="none"), slow)
    for mistake in ("keys of pass k-1", "carries pass 1", "boundary of pass 1", "noise from 0"):
        loss, gradients = evaluate(model, rows, condition, wrong, prefixes, mistake=mistake)
        assert abs(loss.objective - slow[0].objective) > 1e-6, mistake
        assert max((gradients[n] - slow[1][n]).abs().max() for n in gradients) > 1e-4, mistake


def test_a_prefix_that_leaves_nothing_to_fuse_is_refused(isometric_model):
    model, tokens = isometric_model(), torch.zeros(2, 8, dtype=torch.long)
    for prefix in (-1, 7, 30, torch.tensor([2, 7]), torch.tensor([-1, 2])):
        for compute in (multipass, multipass_reference):
            with pytest.raises(ValueError, match=r"is outside 0 … 6"):
                compute(model, tokens, [prefix])


def test_jitter_is_the_same_however_the_batch_is_split(isometric_model, packed_rows):
    model, rows = isometric_model(), packed_rows(PACKED)
    order = torch.tensor([2, 0, 3, 1])
    whole = multipass(model, rows.tokens, [4, 9], jitter=Jitter(0.1, 0, 5, torch.arange(4)))
    parts = [multipass(model, rows.tokens[[r]], [4, 9], jitter=Jitter(0.1, 0, 5, torch.tensor([r]))) for r in range(4)]
    shuffled = multipass(model, rows.tokens[order], [4, 9], jitter=Jitter(0.1, 0, 5, order))
    quiet = multipass(model, rows.tokens, [4, 9])
    for k in range(3):
        torch.testing.assert_close(torch.cat([p[k].states for p in parts]), whole[k].states, rtol=0, atol=1e-10)
        torch.testing.assert_close(shuffled[k].states, whole[k].states[order], rtol=0, atol=1e-10)
        assert torch.equal(quiet[k].states, whole[k].states) == (k == 0)
