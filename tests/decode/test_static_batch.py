"""Generation in fixed buffers: the same tokens as without, whoever finishes when."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from decode.cases import CONTEXT, WINDOW, random_prompts
from fullband.data.tokenizers import ByteTokenizer
from fullband.decode import Speculation, collect, generate, generate_texts, prefill, stream, stream_from
from fullband.model import FullBandModel
from fullband.trunk.protocol import TrunkOutput

MODES: list[tuple[str, int | str | None]] = [("standard", None), ("soft", None), ("fused", 2), ("fused", "exact")]
every_mode = pytest.mark.parametrize(("mode", "passes"), MODES, ids=str)
DRAWN: dict[str, Any] = {"temperature": 3.0, "top_k": 20, "repetition_penalty": 1.2, "seed": 4}


@every_mode
@pytest.mark.parametrize("lengths", [[1], [5, 5], [1, WINDOW, 18]], ids=str)
@pytest.mark.parametrize("settings", [{}, {"n": 3} | DRAWN], ids=["greedy", "drawn"])
def test_it_equals_growing_caches(
    model: FullBandModel, mode: str, passes: int | str | None, lengths: list[int], settings: dict[str, Any]
) -> None:
    prompts = random_prompts(lengths)
    ordinary = generate(model, prompts, mode, passes, max_new_tokens=2 * WINDOW, **settings)
    assert generate(model, prompts, mode, passes, max_new_tokens=2 * WINDOW, static=True, **settings) == ordinary


def test_rows_that_finish_at_different_times(model: FullBandModel) -> None:
    """By stop ids, by their own limits, and because they are dropped; the longest prompt is done first, the shortest fills the context."""
    prompts = random_prompts([3, 40, 17, 3])
    whole = generate(model, prompts)
    assert [len(row.tokens) for row in whole] == [CONTEXT - 3, CONTEXT - 40, CONTEXT - 17, CONTEXT - 3]
    assert generate(model, prompts, static=True) == whole
    stop = {whole[2].tokens[4]}
    assert generate(model, prompts, stop_ids=stop, static=True) == generate(model, prompts, stop_ids=stop)
    steps = stream(model, prompts, static=True)
    next(steps)
    steps.drop([0])
    assert [row.tokens for row in collect(steps)] == [row.tokens[1:] for row in whole[1:]]
    assert [row.tokens for row in generate(model, prompts, max_new_tokens=1, max_length=41, static=True)] == [r.tokens[:1] for r in whole]


def test_texts_and_states(model: FullBandModel, isometric_model: Callable[..., FullBandModel]) -> None:
    prompts = random_prompts([4, 9])
    state = prefill(model, prompts)
    for static in (True, False):  # the state stays valid
        assert collect(stream_from(model, state, max_new_tokens=7, n=2, static=static)) == generate(model, prompts, max_new_tokens=7, n=2)
    reader, tokenizer = isometric_model(vocab_size=257, window=WINDOW, context=CONTEXT), ByteTokenizer()
    settings: dict[str, Any] = {"max_new_tokens": 12, "stop": "\x00", "temperature": 1.0}
    ordinary = generate_texts(reader, tokenizer, ["ab", "né, ö"], "fused", **settings)
    assert generate_texts(reader, tokenizer, ["ab", "né, ö"], "fused", static=True, **settings) == ordinary


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"static": True, "overflow": "slide"}, "static decodes in fixed buffers, which overflow='slide' cannot use"),
        ({"compile": True, "overflow": "slide"}, "compile decodes in fixed buffers, which overflow='slide' cannot use"),
        ({"static": True, "speculation": Speculation()}, "which speculation cannot use: leave out one of the two"),
    ],
)
def test_what_fixed_buffers_cannot_do(model: FullBandModel, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        stream(model, [[1, 2]], max_new_tokens=4, **settings)
    assert "\n" not in str(error.value)


def test_a_trunk_with_another_cache_is_refused(model: FullBandModel, monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherCache:
        """As a trunk of another kind would return it."""

        length = 2

    monkeypatch.setattr(model.trunk, "above", lambda inputs, *past: TrunkOutput(inputs, (), OtherCache()))
    with pytest.raises(ValueError, match=r"fixed buffers are for the built-in decoder, .* not OtherCache"):
        generate(model, [[1, 2]], max_new_tokens=4, static=True)


def test_no_compiler_is_one_line(model: FullBandModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*_: Any) -> None:
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: no_compiler)
    with pytest.raises(ValueError, match=r"needs a C\+\+ compiler: install g\+\+ or clang"):
        generate(model, [[1, 2]], max_new_tokens=4, compile=True)


@pytest.mark.slow
def test_more_shapes_than_torch_would_compile(isometric_model: Callable[..., FullBandModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve; torch gives up at the ninth. The shapes are traced, but not compiled."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = isometric_model(vocab_size=29, window=WINDOW, context=CONTEXT, layers=2, full_every=2)
    for rows in (1, 2, 4):
        for length in (5, 12, 20, 40):
            prompts = random_prompts([length] * rows, seed=rows)
            assert generate(model, prompts, max_new_tokens=3, compile=True) == generate(model, prompts, max_new_tokens=3)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["standard", "fused"])
def test_compiled(isometric_model: Callable[..., FullBandModel], mode: str) -> None:
    """The second batch has fewer and shorter rows, but the shape that they are filled up to; so the code is there."""
    model = isometric_model(vocab_size=29, window=WINDOW, context=CONTEXT, layers=2, full_every=2)
    first, second = random_prompts([4, 13, 2, 9]), random_prompts([7, 5, 3], seed=5)
    assert generate(model, first, mode, max_new_tokens=9, compile=True) == generate(model, first, mode, max_new_tokens=9)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert generate(model, second, mode, max_new_tokens=12, compile=True, **DRAWN) == generate(
            model, second, mode, max_new_tokens=12, **DRAWN
        )
