"""App. A models in vLLM: our decoder's layers over vLLM's keys and values, in the layout of `fullband train` and of `fullband convert`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vllm_plugin.asking import MODES, answers, asked, carried, expected, outputs, prompts

pytestmark = pytest.mark.vllm
vllm = pytest.importorskip("vllm", reason="vLLM is not installed")

SHAPE = {
    "vocab_size": 512, "width": 96, "layers": 5, "heads": 4, "kv_heads": 2, "head_dim": 32, "glu_width": 160, "context": 256, "window": 24,
    "full_every": 3, "norm_eps": 1e-3, "rope_base": 5000.0, "rope": {"factor": 2.0, "original": 128},
}  # fmt: skip
NEW = 40


def near_isometric(**others: Any) -> Any:
    """An App. A model whose every part is seen in its tokens, and in which rounding does not grow."""
    from fullband import FullBandModel, TrunkConfig

    torch.manual_seed(3)
    model = FullBandModel(TrunkConfig(**SHAPE | others), "gated").eval()
    merger = model.connection.mergers[0]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_((torch.rand_like(parameter) + 0.5) * (3 if "attention_norm_out" in name else 1))
        nn.init.normal_(model.trunk.embedding.weight)
        nn.init.orthogonal_(merger.state.weight)
        nn.init.normal_(merger.gate.weight, std=0.05)
    return model


@pytest.fixture(scope="module")
def native() -> Any:
    return near_isometric()


@pytest.fixture(scope="module")
def own(native: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder as `fullband train` writes it."""
    from fullband import load_tokenizer

    folder = tmp_path_factory.mktemp("own")
    native.save(folder)
    load_tokenizer("bytes").save(folder)
    return folder


@pytest.fixture(scope="module")
def exported(own: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder as `fullband convert` writes it."""
    from fullband.hf.convert import convert

    folder = tmp_path_factory.mktemp("exported") / "model"
    convert(own, folder)
    return folder


def test_every_mode_equals_the_model_here(start: Callable[..., Any], own: Path, native: Any) -> None:
    """Gated grouped-query attention, norms of queries and keys, windows shorter than prompts, in the layout of `fullband train`."""
    llm = start(model=str(own), block_size=32)
    given, plain = prompts(), expected(native, prompts(), "standard", None, NEW)
    for mode, passes in MODES:
        found = answers(llm, given, [asked(mode, passes, NEW)] * 16)
        assert found == expected(native, given, mode, passes, NEW), (mode, passes)
        assert mode == "standard" or sum(one != other for one, other in zip(found, plain, strict=True)) >= 15
    assert answers(llm, given[:2], [asked(None, None, NEW)] * 2) == expected(native, given[:2], "soft", None, NEW)
    params = vllm.SamplingParams(temperature=0, max_tokens=1, logprobs=5, detokenize=False)
    for prompt, output in zip(given, outputs(llm, given, [params] * 16), strict=True):
        right = native(torch.tensor([prompt])).logits[0, -1].log_softmax(dim=-1)
        assert all(abs(found.logprob - float(right[token])) < 1e-4 for token, found in output.outputs[0].logprobs[0].items())


def test_the_windows_are_seen(native: Any) -> None:
    """The control of the test above: with windows one key wider or narrower, all long prompts get other tokens."""
    long = [prompt for prompt in prompts() if len(prompt) > 30]
    right = expected(native, long, "soft", None, NEW)
    for window in (23, 25):
        found = expected(near_isometric(window=window), long, "soft", None, NEW)
        assert all(one != other for one, other in zip(found, right, strict=True))


def test_two_sets_chunks_prefixes_and_preemption(start: Callable[..., Any], exported: Path, native: Any, preempted: list[str]) -> None:
    """vLLM keeps the keys of layers with a window apart, and gives up blocks that no query can see any more."""
    llm = start(
        model=str(exported), additional_config={"fused": "two_kv"}, enable_prefix_caching=True, enable_chunked_prefill=True,
        max_num_batched_tokens=64, block_size=32, num_gpu_blocks_override=64,
    )  # fmt: skip

    def cached(given: list[list[int]], modes: list[tuple[str, int | None]]) -> int:
        """Prompt tokens that came out of the cache, once the answers are right."""
        found = outputs(llm, given, [asked(*mode, NEW) for mode in modes])
        for number, (output, prompt, mode) in enumerate(zip(found, given, modes, strict=True)):
            assert list(output.outputs[0].token_ids) == expected(native, [prompt], *mode, NEW)[0], (number, mode)
        return sum(output.num_cached_tokens or 0 for output in found)

    cached(prompts(), [MODES[number % 3] for number in range(16)])
    assert preempted
    text = prompts()[7]
    cached([text, text], MODES[1:3])
    for mode in MODES[:3]:
        assert cached([[*text[:100], 7, 8, 9]], [mode]) == 96, mode
    answers(llm, [[1, 2]], [asked("standard", None, 2)])
    assert not carried(llm).histories, "no state is left behind"


def test_compiled_and_in_texts(start: Callable[..., Any], exported: Path, native: Any) -> None:
    llm = start(model=str(exported), enforce_eager=False, skip_tokenizer_init=False)
    given, modes = prompts(), [MODES[number % 4] for number in range(16)]
    found = answers(llm, given, [asked(*mode, NEW) for mode in modes])
    for number, (prompt, mode) in enumerate(zip(given, modes, strict=True)):
        assert found[number] == expected(native, [prompt], *mode, NEW)[0], (number, mode)
    text = llm.generate("def main(", asked("soft", None, 5), use_tqdm=False)[0]
    assert text.prompt_token_ids == list(b"def main(")
    assert list(text.outputs[0].token_ids) == expected(native, [list(b"def main(")], "soft", None, 5)[0]


def test_what_it_cannot_serve_is_refused_at_start(start: Callable[..., Any], own: Path, tmp_path: Path) -> None:
    from fullband import ConnectionConfig, FullBandModel, TrunkConfig

    FullBandModel(TrunkConfig(**SHAPE | {"head_dim": 16})).save(tmp_path / "narrow")
    FullBandModel(TrunkConfig(**SHAPE), ConnectionConfig(source="middle")).save(tmp_path / "middle")
    with pytest.raises(Exception, match=r"heads of 32.*not 16; `fullband serve` takes this model"):
        start(model=str(tmp_path / "narrow"))
    with pytest.raises(Exception, match="the top state to the input of the stack only"):
        start(model=str(tmp_path / "middle"))
    with pytest.raises(Exception, match=r"no tokenizer or generation config .* `fullband convert`"):
        start(model=str(own), skip_tokenizer_init=False)


@pytest.mark.parametrize("missing", [True, False])
def test_wrong_weights_are_named(start: Callable[..., Any], own: Path, tmp_path: Path, missing: bool) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(own, tmp_path / "m")
    (tmp_path / "m" / "manifest.json").unlink(missing_ok=True)
    tensors, name = load_file(tmp_path / "m" / "model.safetensors"), "trunk.blocks.1.attention.gate.weight"
    tensors[name] = torch.zeros(1, 96)
    if missing:
        del tensors[name]
    save_file(tensors, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    with pytest.raises(Exception, match=f"has no weight '{name}'" if missing else rf"'{name}' \[1, 96\] does not belong"):
        start(model=str(tmp_path / "m"))
