"""`fullband serve` in a process of its own, with either engine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx


class Server:
    """A running `fullband serve`."""

    def __init__(self, engine: str, folder: Path, log: Path, settings: dict[str, Any] | None = None):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        further = ["--", "--enforce-eager", "--max-model-len", "256", "--additional-config", json.dumps(settings or {})]
        command = [sys.executable, "-m", "fullband", "serve", str(folder), "--port", str(port), "--engine", engine, "--rows", "8"]
        command += further if engine == "vllm" else []
        given = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        self.engine, self.folder, self.log = engine, folder, log
        self.address = f"http://127.0.0.1:{port}"
        self.child = subprocess.Popen(command, stdout=log.open("w"), stderr=subprocess.STDOUT, env=given)
        for _ in range(600):
            try:
                if httpx.get(f"{self.address}/health").status_code == 200:
                    return
            except httpx.TransportError:
                assert self.child.poll() is None, log.read_text()[-3000:]
            time.sleep(0.2)
        raise AssertionError(log.read_text()[-3000:])

    def of_mode(self, mode: str | None, passes: int | None = None) -> dict[str, Any]:
        """The fields of a request that name its mode."""
        asked = {name: value for name, value in (("mode", mode), ("feedback_passes", passes)) if value is not None}
        return {"vllm_xargs": asked} if self.engine == "vllm" else asked

    def running(self) -> float:
        """Requests that are not done."""
        name = "vllm:num_requests_running" if self.engine == "vllm" else "fullband_running_sequences"
        lines = httpx.get(f"{self.address}/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    def stop(self) -> None:
        """As a supervisor does it."""
        self.child.send_signal(signal.SIGTERM)
        try:
            assert self.child.wait(60) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
        finally:
            self.child.kill()
