"""Law 1 (feedback unused = the plain trunk), law 2 (passes against the sequential recurrence), law 5 (documents are islands)."""

import pytest
import torch

from fullband.feedback.multipass import Jitter, multipass
from fullband.feedback_config import FusionName
from fullband.layout import Layout
from reference import decoder as reference
from reference.seam import embed, fused_pass, iterate, read, run_trunk

MERGERS = list(FusionName.__args__)
LENGTHS = [[5, 7, 2], [14], [-3, 4, 7], [6, 1, 1, 6]]


@torch.no_grad()
@pytest.mark.parametrize("fusion", MERGERS)
def test_law_1_unused_feedback_is_the_plain_trunk_bit_for_bit(isometric_model, packed_rows, fusion):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model, rows = isometric_model(fusion).to(dtype), packed_rows(LENGTHS)
        plain, _ = run_trunk(model.trunk, embed(model.trunk, rows.tokens), rows.positions, rows.documents)
        place = (rows.positions, rows.documents)
        assert torch.equal(read(model, rows.tokens, 0, *place), plain)
        assert torch.equal(multipass(model, rows.tokens, [], Layout(*place))[0].states, plain)
        everywhere = torch.ones_like(rows.tokens, dtype=torch.bool)
        e, noise = embed(model.trunk, rows.tokens), torch.ones_like(plain)
        unused, _ = fused_pass(model, e, torch.full_like(plain, 7.0), None, *place, plain_BT=everywhere, noise_BTD=noise)
        assert torch.equal(unused, plain)
        unpacked, _ = run_trunk(model.trunk, e)
        assert torch.equal(read(model, rows.tokens, 0), unpacked)


@torch.no_grad()
@pytest.mark.parametrize("fusion", MERGERS)
@pytest.mark.parametrize("packed", [False, True])
def test_law_2_pass_n_settles_the_first_n_positions(isometric_model, packed_rows, fusion, packed):
    model, rows = isometric_model(fusion), packed_rows(LENGTHS)
    if fusion == "residual":
        torch.nn.init.orthogonal_(model.connection.mergers[0].state.weight)
    place = (rows.positions, rows.documents) if packed else (None, None)
    length = rows.tokens.shape[1]
    depth = rows.positions if packed else torch.arange(length).expand(rows.tokens.shape)
    exact = read(model, rows.tokens, "exact", *place)
    for n, states in zip(range(1, length + 1), iterate(model, rows.tokens, *place), strict=False):
        final = depth < n
        torch.testing.assert_close(states[final], exact[final], rtol=0, atol=1e-10)
        moving = (depth == n) & (rows.documents >= 0) if packed else depth == n
        if moving.any():
            weakest = 1e-13 if fusion == "recirculation" else 1e-6
            assert (states - exact)[moving].norm(dim=-1).min() > weakest, "a position that is not final yet is exact: no feedback?"
        torch.testing.assert_close(read(model, rows.tokens, n - 1, *place), states, rtol=0, atol=0)
    torch.testing.assert_close(states, exact, rtol=0, atol=1e-10)


@torch.no_grad()
def test_exact_equals_the_loop_written_recurrence(isometric_model):
    model, tokens = isometric_model(), torch.randint(23, (2, 7))
    torch.testing.assert_close(read(model, tokens, "exact"), reference.sequential(model, tokens), rtol=0, atol=1e-10)


@torch.no_grad()
def test_passes_equal_the_loop_written_listing(isometric_model, packed_rows):
    """Listing 3 with mixin, jitter and documents: shift, jitter, fuse, normalise, revert the prefix, rerun."""
    model, rows = isometric_model(), packed_rows([[3, 6], [9]])
    jitter = Jitter(0.3, seed=5, step=2, rows=torch.tensor([0, 1]))
    for prefixes in ([1, 4], [4, 1], [0]):
        noise = [jitter(k, 0, 9, torch.zeros(2, 9, 16, dtype=torch.float64)) for k in range(2, len(prefixes) + 2)]
        expected = reference.passes(model, rows.tokens, prefixes, rows.positions, rows.documents, noise)
        for output, states in zip(
            multipass(model, rows.tokens, prefixes, Layout(rows.positions, rows.documents), jitter), expected, strict=True
        ):
            torch.testing.assert_close(output.states, states[:, output.start :], rtol=0, atol=1e-10)


@torch.no_grad()
def test_a_packed_document_reads_as_if_alone(isometric_model, packed_rows):
    model, rows = isometric_model(), packed_rows([[5, 7, 2]])
    for passes in (0, 1, 3, "exact"):
        packed = read(model, rows.tokens, passes, rows.positions, rows.documents)
        for start, stop in ((0, 5), (5, 12), (12, 14)):
            alone = read(model, rows.tokens[:, start:stop], passes)
            torch.testing.assert_close(packed[:, start:stop], alone, rtol=0, atol=1e-10)


def computations():
    """Everything that turns embeddings into states, as functions (model, rows) -> list of (first position, states)."""
    yield from ((f"read {n}", lambda m, r, n=n: [(0, read(m, r.tokens, n, r.positions, r.documents))]) for n in (0, 1, 3, "exact"))
    for prefixes in ([0], [2, 8], [8, 2], [6, 6, 3], [torch.tensor([2, 9])]):
        for pieces in (False, True):

            def run(m, r, prefixes=prefixes, pieces=pieces):
                jitter = Jitter(0.02, 0, 3, torch.arange(r.tokens.shape[0]))
                return [(o.start, o.states) for o in multipass(m, r.tokens, prefixes, Layout(r.positions, r.documents), jitter, pieces)]

            yield f"multipass {prefixes} pieces={pieces}", run


@pytest.mark.parametrize("name, compute", list(computations()), ids=[name for name, _ in computations()])
def test_law_5_nothing_crosses_a_document_boundary(isometric_model, packed_rows, name, compute):
    model, rows = isometric_model(), packed_rows([[5, 7, 2], [5, 6, -3]])
    real_below = model.trunk.below

    def with_gradient(tokens, *others):
        lower = real_below(tokens, *others)
        with_gradient.leaf = lower.x_BTD.detach().requires_grad_()
        return lower._replace(x_BTD=with_gradient.leaf)

    model.trunk.below = with_gradient
    before = compute(model, rows)
    leaf = with_gradient.leaf
    for document in (0, 1, 2):
        inside = rows.documents == document
        own = sum((states * torch.randn_like(states))[inside[:, start:]].sum() for start, states in before)
        (gradient,) = torch.autograd.grad(own, leaf, retain_graph=True)
        assert gradient[inside].abs().sum() > 0
        assert (gradient[~inside] == 0).all(), f"document {document} has a gradient outside itself"
    tokens = rows.tokens.clone()
    changed = rows.documents == 0
    rows.tokens[changed] = (tokens[changed] + 1) % 23
    after = compute(model, rows)
    for (start, old), (_, new) in zip(before, after, strict=True):
        others = (rows.documents > 0)[:, start:]
        torch.testing.assert_close(new[others], old[others], rtol=0, atol=1e-13)
        assert not torch.equal(new[~others], old[~others]) or start >= 5


def test_documents_without_positions_are_refused_where_states_are_fed_back(isometric_model, packed_rows):
    """Positions say where a document starts; without them its first token would be fused with its neighbour's last state."""
    model, rows = isometric_model(), packed_rows([[5, 7, 2]])
    for compute in (
        lambda: read(model, rows.tokens, 1, documents=rows.documents),
        lambda: read(model, rows.tokens, "exact", documents=rows.documents),
        lambda: multipass(model, rows.tokens, [3], Layout(documents_BT=rows.documents)),
    ):
        with pytest.raises(ValueError, match="positions"):
            compute()


@torch.no_grad()
def test_a_row_that_begins_inside_a_document_begins_plain(isometric_model):
    """There is no state before it to carry."""
    model, tokens = isometric_model(), torch.randint(23, (2, 6))
    late = torch.arange(3, 9)[None].expand(2, 6)
    plain, fused = read(model, tokens, 0, late), read(model, tokens, 2, late)
    torch.testing.assert_close(fused[:, 0], plain[:, 0], rtol=0, atol=1e-12)
    torch.testing.assert_close(read(model, tokens, "exact", late), read(model, tokens, 5, late), rtol=0, atol=1e-10)


def test_bad_reads_are_refused_in_words(isometric_model):
    model = isometric_model()
    tokens = torch.zeros(1, 4, dtype=torch.long)
    for wrong in (-1, "twice", 1.5, None):
        with pytest.raises(ValueError, match="feedback_passes is 0, 1, 2"):
            read(model, tokens, wrong)
    for compute in (lambda t: read(model, t, 1), lambda t: multipass(model, t, [3])):
        with pytest.raises(ValueError, match="65 tokens do not fit the model's context of 64"):
            compute(torch.zeros(1, 65, dtype=torch.long))
