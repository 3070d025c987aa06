import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullband.data import IGNORE, PADDING, pack_documents
from fullband.data.packing import as_document

documents_of_tokens = st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=20), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(documents_of_tokens, st.integers(1, 17))
def test_packing_loses_and_crosses_nothing(documents: list[list[int]], length: int) -> None:
    batch = pack_documents([np.array(tokens) for tokens in documents], length)
    stream = [token for tokens in documents for token in tokens]
    wanted = [target for tokens in documents for target in [*tokens[1:], IGNORE]]
    filled = batch.documents != PADDING
    assert batch.tokens[filled].tolist() == stream  # every token once, in order
    assert batch.targets[filled].tolist() == wanted  # the true next token of its own document, also at a row's end
    assert (batch.targets[~filled] == IGNORE).all() and batch.shape == (-(-len(stream) // length), length)

    owner = [number for number, tokens in enumerate(documents) for _ in tokens]
    offset = [at for tokens in documents for at in range(len(tokens))]
    place = 0
    for positions, ids in zip(batch.positions.tolist(), batch.documents.tolist(), strict=True):
        in_row = [(p, d) for p, d in zip(positions, ids, strict=True) if d != PADDING]
        row_owner, row_offset = owner[place : place + len(in_row)], offset[place : place + len(in_row)]
        place += len(in_row)
        assert [d for _, d in in_row] == [o - row_owner[0] for o in row_owner]  # ids count the row's documents from 0
        cut = row_offset[0]  # a document continued from the row before restarts at 0
        assert [p for p, _ in in_row] == [at - cut if o == row_owner[0] else at for o, at in zip(row_owner, row_offset, strict=True)]


def test_a_worked_example() -> None:
    batch = pack_documents([np.array([1, 2, 9]), np.array([3, 4, 5, 6, 9])], length=5)
    assert batch.tokens.tolist() == [[1, 2, 9, 3, 4], [5, 6, 9, 0, 0]]
    assert batch.targets.tolist() == [[2, 9, IGNORE, 4, 5], [6, 9, IGNORE, IGNORE, IGNORE]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 0, 0]]
    assert batch.documents.tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, PADDING, PADDING]]


def test_a_whole_document_and_nothing() -> None:
    document = as_document(np.array([1, 2, 9]))
    assert (document.tokens.tolist(), document.targets.tolist(), len(document)) == ([1, 2, 9], [2, 9, IGNORE], 3)
    with pytest.raises(ValueError, match="no tokens"):
        pack_documents([], 4)
