from __future__ import annotations

from collections.abc import Callable

import pytest

from decode.cases import CONTEXT, VOCABULARY, WINDOW
from fullband.model import FullBandModel


@pytest.fixture
def model(isometric_model: Callable[..., FullBandModel]) -> FullBandModel:
    """Float64; two sliding layers and a full one."""
    return isometric_model(vocab_size=VOCABULARY, window=WINDOW, context=CONTEXT)
