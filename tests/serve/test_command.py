"""`fullband serve` as a command: it starts, answers, ends with what was begun; which engine it takes; what it refuses."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli.commands import refused
from fullband.cli import serve
from fullband.config import TrunkConfig
from fullband.data.tokenizers import ByteTokenizer
from fullband.model import FullBandModel

SLOW = """import time
from fullband.serve.engine import LocalEngine
step = LocalEngine.step
LocalEngine.step = lambda *given: (time.sleep(0.1), step(*given))[1]
from fullband.__main__ import main
main()
"""


@pytest.fixture(scope="module")
def folder(served_model: FullBandModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("serve") / "m"
    served_model.save(path)
    ByteTokenizer().save(path)
    return path


@pytest.mark.skipif(sys.platform == "win32", reason="signals of Unix")
def test_it_serves_until_it_is_told_to_stop(folder: Path) -> None:
    command = [sys.executable, "-m", "fullband", "serve", str(folder), "--port", "0", "--device", "cpu", "--engine", "own"]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert child.stderr is not None
        line = child.stderr.readline()
        address = next(word for word in line.replace(",", "").split() if word.startswith("http://"))
        body = {"prompt": "abc", "max_tokens": 3, "model": "m", "temperature": 0}
        for _ in range(100):
            try:
                answer = httpx.post(f"{address}/v1/completions", json=body, timeout=30)
                break
            except httpx.ConnectError:
                time.sleep(0.1)
        assert answer.json()["usage"]["completion_tokens"] == 3
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=30) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
        assert "Traceback" not in child.stderr.read()
    finally:
        child.kill()


@pytest.mark.skipif(sys.platform == "win32", reason="signals of Unix")
def test_told_twice_it_stops_at_once_without_a_traceback(folder: Path) -> None:
    command = [sys.executable, "-c", SLOW, "serve", str(folder), "--port", "0", "--device", "cpu", "--engine", "own"]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert child.stderr is not None
        address = next(word for word in child.stderr.readline().replace(",", "").split() if word.startswith("http://"))
        for _ in range(100):
            try:
                httpx.get(f"{address}/health", timeout=30)
                break
            except httpx.ConnectError:
                time.sleep(0.1)
        host, _, port = address.removeprefix("http://").partition(":")
        body = b'{"prompt": "a", "max_tokens": 60, "min_tokens": 60}'
        with socket.create_connection((host, int(port))) as asking:
            asking.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            while "fullband_running_sequences 1.0" not in httpx.get(f"{address}/metrics", timeout=30).text:
                time.sleep(0.02)
            child.send_signal(signal.SIGINT)
            time.sleep(0.5)
            assert child.poll() is None, "it finishes what was begun"
            child.send_signal(signal.SIGINT)
            child.wait(timeout=30)
        assert "Traceback" not in child.stderr.read()
    finally:
        child.kill()


def test_vllm_takes_over_where_it_is_installed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[list[str]] = []

    def execv(path: str, words: list[str]) -> Any:
        executed.append(words)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", execv)
    for head_dim in (32, 16):
        shape = TrunkConfig(vocab_size=257, width=32, layers=1, heads=2, kv_heads=1, head_dim=head_dim, glu_width=8, context=8, window=8)
        FullBandModel(shape).save(tmp_path / f"{head_dim}")
        for name in ("tokenizer.json", "generation_config.json"):  # as `fullband convert` writes them
            (tmp_path / f"{head_dim}" / name).touch()
    assert not serve.vllm_serves(tmp_path / "32"), "it is not installed here"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert serve.vllm_serves(tmp_path / "32")
    assert not serve.vllm_serves(tmp_path / "16"), "its attention does not take heads of 16"
    assert not serve.vllm_serves(folder), "it has no tokenizer that transformers reads"
    monkeypatch.setattr("fullband.model.is_converted", lambda path: True)
    assert serve.vllm_serves(folder)
    with pytest.raises(SystemExit):
        serve.hand_over_to_vllm(folder, "127.0.0.1", 8000, "fused", "secret", 4, "float32", True, ["--enforce-eager"])
    assert executed[0][1:3] == ["-m", "vllm.entrypoints.openai.api_server"] and "secret" not in executed[0]
    assert executed[0][-3:] == ["--middleware", "fullband.vllm.page.Playground", "--enforce-eager"]
    assert os.environ.pop("VLLM_API_KEY") == "secret" and '{"latent_feedback_mode": "fused"}' in executed[0]


def test_what_is_refused(folder: Path, tmp_path: Path) -> None:
    assert "unknown mode" in refused("serve", folder, "--mode", "sofd")
    assert "--engine: must be auto, own or vllm" in refused("serve", folder, "--engine", "llama.cpp")
    assert "--foo: only vLLM takes further settings" in refused("serve", folder, "--", "--foo")
    assert "no such model folder" in refused("serve", tmp_path / "nothing")


def test_an_address_that_is_taken_or_is_none(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "can't listen at 127.0.0.1" in refused("serve", folder, "--engine", "own", "--port", str(taken.getsockname()[1]))
    assert "can't listen at 300.1.1.1" in refused("serve", folder, "--engine", "own", "--host", "300.1.1.1")


@pytest.mark.parametrize("missing", ["uvicorn", "prometheus_client", "starlette.applications"])
def test_without_the_extra_it_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.delitem(sys.modules, "fullband.serve.app", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    said = refused("serve", folder, "--engine", "own")
    assert f"serving needs the package {missing.partition('.')[0]}: pip install 'fullband[serve]'" in said
