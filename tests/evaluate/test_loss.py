from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F

from fullband.config import TrunkConfig
from fullband.data.batch import IGNORE
from fullband.evaluate import accuracy_by_position, loss_by_passes
from fullband.evaluate.loss import ratio_and_stderr
from fullband.model import FullBandModel
from reference.seam import read

CONTEXT = 12


@pytest.fixture(scope="module")
def model() -> FullBandModel:
    torch.manual_seed(0)
    config = TrunkConfig(vocab_size=23, width=16, layers=2, heads=2, kv_heads=1, glu_width=32, context=CONTEXT, window=4, full_every=2)
    model = FullBandModel(config).double().eval()
    torch.nn.init.normal_(model.trunk.embedding.weight)
    return model


def documents(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(23, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def sum_by_hand(model: FullBandModel, document: list[int], passes: int | str) -> float:
    """Cross-entropy of one document, piece by piece, one row at a time, all logits at once."""
    inputs, targets = document[:-1], document[1:]
    total = 0.0
    for start in range(0, len(inputs), CONTEXT):
        states = read(model, torch.tensor([inputs[start : start + CONTEXT]]), passes)
        total += float(F.cross_entropy(model.trunk.head(states[0]), torch.tensor(targets[start : start + CONTEXT]), reduction="sum"))
    return total


def test_loss_equals_a_hand_computation(model: FullBandModel) -> None:
    texts = documents([2, 7, 13, 30, 1, 25])  # a single token predicts nothing; 30 and 25 are longer than the context
    report = loss_by_passes(model, texts, [0, 1, 2, "exact"], batch_tokens=30)
    assert (report.documents, report.tokens) == (5, 1 + 6 + 12 + 29 + 24)
    plain = [sum_by_hand(model, text, 0) for text in texts]
    counts = [len(text) - 1 for text in texts]
    for row in report.rows:
        sums = [sum_by_hand(model, text, row.feedback_passes) for text in texts]
        loss = sum(sums) / report.tokens
        assert row.loss == pytest.approx(loss, abs=1e-10)
        assert row.perplexity == pytest.approx(math.exp(loss))
        squares = sum((total - loss * count) ** 2 for total, count in zip(sums, counts, strict=True))
        assert row.loss_stderr == pytest.approx(math.sqrt(5 / 4 * squares) / report.tokens)
        assert row.perplexity_stderr == pytest.approx(math.exp(loss) * row.loss_stderr)
        changes = [after - before for after, before in zip(sums, plain, strict=True)]
        change = sum(changes) / report.tokens
        squares = sum((total - change * count) ** 2 for total, count in zip(changes, counts, strict=True))
        assert row.difference == pytest.approx(change, abs=1e-10)
        assert row.difference_stderr == pytest.approx(math.sqrt(5 / 4 * squares) / report.tokens, abs=1e-12)
    assert (report.rows[0].difference, report.rows[0].difference_stderr) == (0, 0)


def test_batches_do_not_matter_and_rows_come_as_asked(model: FullBandModel) -> None:
    texts = documents([5, 9, 4, 20, 8])
    small, large = (loss_by_passes(model, texts, [2, 1], batch_tokens=size) for size in (1, 1000))
    assert [row.feedback_passes for row in small.rows] == [2, 1]
    for one, other in zip(small.rows, large.rows, strict=True):
        assert one.loss == pytest.approx(other.loss, abs=1e-12) and one.difference == pytest.approx(other.difference, abs=1e-12)


def test_a_document_in_pieces_is_one_document(model: FullBandModel) -> None:
    report = loss_by_passes(model, documents([40]), [0, 1])
    assert report.documents == 1 and report.tokens == 39
    assert report.rows[1].loss_stderr is None and report.rows[1].difference_stderr is None
    assert json.loads(json.dumps(report.to_json()))["rows"][1]["difference_stderr"] is None


def test_the_standard_error_is_that_of_a_bootstrap() -> None:
    """400 documents of very different lengths whose mean loss depends on the length; 2,000 resamples."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(5, 200, (400,), generator=generator).double()
    sums = counts * (3 + torch.randn(400, generator=generator, dtype=torch.float64) - 0.005 * counts)
    ratio, stderr = ratio_and_stderr(sums, counts)
    drawn = torch.randint(400, (2000, 400), generator=generator)
    resampled = sums[drawn].sum(1) / counts[drawn].sum(1)
    assert ratio == pytest.approx(float(sums.sum() / counts.sum()))
    assert stderr == pytest.approx(float(resampled.std()), rel=0.06)


@pytest.mark.parametrize(
    ("texts", "settings", "message"),
    [
        ([[1]], {}, "no document has two tokens"),
        ([], {}, "no document has two tokens"),
        ([[1, 2], [3, 23]], {}, r"document 1: token id 23 is outside the vocabulary \(0\.\.22\)"),
        ([[1, 2]], {"feedback_passes": [-1]}, "not -1"),
        ([[1, 2]], {"feedback_passes": []}, "at least one"),
    ],
)
def test_bad_input(model: FullBandModel, texts: list[list[int]], settings: dict[str, list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loss_by_passes(model, texts, **settings)


@pytest.mark.parametrize("passes", [0, 2, "exact"])
def test_accuracy_by_position(model: FullBandModel, passes: int | str) -> None:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(23, (50, 8), generator=generator)
    with torch.no_grad():
        answers = model.trunk.head(read(model, tokens, passes)).argmax(-1)
    wrong = torch.rand(answers.shape, generator=generator) < torch.linspace(0, 1, 8)
    targets = torch.where(wrong, (answers + 1) % 23, answers)
    targets[::3, 4] = IGNORE
    targets[:, 6] = IGNORE
    result = accuracy_by_position(model, tokens, targets, passes, batch_rows=7)
    for t in range(8):
        asked = targets[:, t] != IGNORE
        assert result.counts_T[t] == asked.sum()
        if t == 6:
            assert result.accuracy_T[t].isnan() and result.stderr_T[t].isnan()
            continue
        share = float((~wrong[asked, t]).double().mean())
        assert float(result.accuracy_T[t]) == pytest.approx(share)
        assert float(result.stderr_T[t]) == pytest.approx(math.sqrt(share * (1 - share) / int(asked.sum())))
    assert json.loads(json.dumps(result.to_json()))["accuracy"][6] is None


def test_accuracy_refuses_other_shapes(model: FullBandModel) -> None:
    with pytest.raises(ValueError, match=r"both be \[N, T\]"):
        accuracy_by_position(model, torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="context"):
        accuracy_by_position(model, torch.zeros(1, 13, dtype=torch.long), torch.zeros(1, 13, dtype=torch.long))


def test_converged_reading_is_scored_too(model: FullBandModel) -> None:
    """A random model does not contract, so converged reading falls back to the exact one."""
    documents = [torch.randint(model.trunk.vocab_size, (12,)).tolist() for _ in range(3)]
    exact, converged = loss_by_passes(model, documents, ["exact", "converged"]).rows
    assert converged.loss == pytest.approx(exact.loss, abs=1e-3)
    (alone,) = loss_by_passes(model, documents, ["converged"]).rows
    assert alone.loss == pytest.approx(converged.loss)
