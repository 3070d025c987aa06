"""Drawing takes matplotlib tenths of a second a picture, mostly for laying out words. Tests of something else leave that out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import pytest

EMPTY = b'<svg xmlns="http://www.w3.org/2000/svg"></svg>\n'


@contextmanager
def undrawn() -> Iterator[None]:
    """Figures are made, and what is plotted is put into them; an empty picture is written."""

    def save(figure: Any, file: BinaryIO, **options: Any) -> None:
        file.write(EMPTY)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure.savefig", save)
        yield
