import pytest
import torch

from fullband.data import IGNORE, PADDING, Batch, Document, stack


def small_batch() -> Batch:
    tokens = torch.arange(12).reshape(3, 4)
    return Batch(tokens, tokens + 1, torch.arange(4).expand(3, 4), torch.zeros(3, 4, dtype=torch.long))


def test_split_and_rows_are_consecutive() -> None:
    batch = small_batch()
    assert [piece.shape for piece in batch.split(2)] == [(2, 4), (1, 4)]
    assert torch.equal(torch.cat([piece.tokens for piece in batch.split(2)]), batch.tokens)
    assert torch.equal(batch.rows(1, 3).targets, batch.targets[1:])
    assert batch.to("cpu").shape == batch.shape
    assert batch.counted == 12


def test_an_id_outside_the_vocabulary_is_named_with_its_place() -> None:
    batch = small_batch()
    assert batch.validate(13) is batch
    with pytest.raises(ValueError, match=r"^token id 9 in row 2 at position 1 is outside the vocabulary \(0\.\.8\); the data was made "):
        batch.validate(9)
    with pytest.raises(ValueError, match=r"^target id 12 in row 2 at position 3 is outside"):
        batch.validate(12)
    batch.tokens[1, 2] = -7
    with pytest.raises(ValueError, match=r"^token id -7 in row 1 at position 2"):
        batch.validate(100)


def test_ignored_targets_are_valid() -> None:
    tokens = torch.zeros(1, 2, dtype=torch.long)
    Batch(tokens, torch.full((1, 2), IGNORE), tokens, tokens).validate(1)


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="tensors of a batch must have one shape"):
        Batch(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 4))


def test_stack_pads_on_the_right() -> None:
    batch = stack([Document(torch.tensor([5, 6]), torch.tensor([6, IGNORE])), Document(torch.tensor([7]), torch.tensor([IGNORE]))])
    assert batch.tokens.tolist() == [[5, 6], [7, 0]]
    assert batch.targets.tolist() == [[6, IGNORE], [IGNORE, IGNORE]]
    assert batch.positions.tolist() == [[0, 1], [0, 0]]
    assert batch.documents.tolist() == [[0, 0], [0, PADDING]]
    with pytest.raises(ValueError, match="no documents"):
        stack([])
