"""`fullband serve`: a model behind OpenAI's API, and a page to try it."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from fullband.cli.models import Device, Dtype, ModelFolder, open_model

EXAMPLES = """Examples:

\b
  fullband serve runs/tiny-text                                  then open http://127.0.0.1:8000
  fullband serve smollm2-fullband --mode fused --port 9000
  FULLBAND_API_KEY=secret fullband serve smollm2-fullband --host 0.0.0.0
  fullband serve smollm2-fullband --engine vllm -- --additional-config '{"fused": "two_kv"}'     (behind --: settings of vLLM)
  FULLBAND_API_KEY=secret fullband serve policy --allow-weight-updates runs/grpo       rollouts for reinforcement learning

\b
  curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "def main(", "max_tokens": 40, "mode": "soft"}'

\b
The API is OpenAI's: /v1/completions, /v1/chat/completions, /v1/models; beside it /health and /metrics. Requests may name a mode (standard,
soft, fused) and feedback_passes; the openai client sends them in extra_body. Needs pip install 'fullband[serve]'.
"""
OPEN = "anyone who reaches this address can use the model: give a key with FULLBAND_API_KEY"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(
    further: typer.Context,
    model: ModelFolder,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 = any free one.")] = 8000,
    mode: Annotated[str, typer.Option(help="Mode of requests that name none: standard, soft or fused.")] = "soft",
    key: Annotated[
        str | None, typer.Option(envvar="FULLBAND_API_KEY", help="Key that requests must bear; better given as FULLBAND_API_KEY.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, max=4096, help="Maximum number of sequences decoded together.")] = 16,
    waiting: Annotated[int, typer.Option(min=1, help="Maximum number of waiting requests (own server); more get status 429.")] = 256,
    prefix_cache: Annotated[
        int, typer.Option(min=0, metavar="MIB", help="Maximum memory for beginnings of prompts kept for later ones (own server); 0 = none.")
    ] = 512,
    timeout: Annotated[float, typer.Option(min=1, help="Maximum number of seconds for an answer (own server).")] = 600.0,
    playground: Annotated[bool, typer.Option("--playground/--no-playground", help="Show a page at / to try the model.")] = True,
    allow_weight_updates: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Let whoever has the key replace the weights by safetensors below this folder (for training)."),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(metavar="auto|own|vllm", help="What serves: this package, or vLLM; auto = vLLM where it is installed."),
    ] = "auto",
    device: Device = "auto",
    dtype: Dtype = "float32",
) -> None:
    """Serve a model over HTTP.

    Requests join and leave a running batch; each can choose its mode. Ctrl-C and SIGTERM finish what was begun.
    """
    if engine not in ("auto", "own", "vllm"):
        raise ValueError(f"--engine: must be auto, own or vllm, got '{engine}'")
    weights = allow_weight_updates
    if weights is not None:
        checked_weights(weights, key, engine)
    elif engine == "vllm" or (engine == "auto" and vllm_serves(model)):
        hand_over_to_vllm(model, host, port, mode, key, rows, dtype, playground, further.args)
    if further.args:
        raise ValueError(f"{further.args[0]}: only vLLM takes further settings (--engine vllm)")
    try:
        import prometheus_client  # noqa: F401
        import uvicorn

        from fullband.serve.app import Server, Settings
        from fullband.serve.connections import allow_connections, web_config
    except ImportError as missing:
        package = (missing.name or "").partition(".")[0]
        raise ValueError(f"serving needs the package {package}: pip install 'fullband[serve]'") from None
    from fullband.cli.console import messages
    from fullband.data.chat_template import load_chat_template
    from fullband.decode import resolve_mode
    from fullband.serve.engine import LocalEngine
    from fullband.serve.scheduler import Scheduler

    resolve_mode(mode)
    network, tokenizer, folder = open_model(model, device, dtype)
    template = load_chat_template(folder)
    scheduler = Scheduler(LocalEngine(network, prefix_bytes=prefix_cache * 2**20), tokenizer, rows, waiting, network.trunk.device)
    settings = Settings(name=model.resolve().name, mode=mode, key=key or None, seconds=timeout, playground=playground, weights=weights)
    app = Server(scheduler, tokenizer, template if template.is_own else None, settings).app()
    allow_connections()
    sockets = [listen(host, port)]
    address = f"http://{host}:{sockets[0].getsockname()[1]}"
    messages().print(f"{folder}: serving at {address}, mode {mode}" + ("; open it in a browser" if playground else ""), soft_wrap=True)
    if host not in LOOPBACK and not key:
        messages().print(OPEN, soft_wrap=True)
    try:
        uvicorn.Server(web_config(app, settings.idle_seconds)).run(sockets=sockets)
    finally:
        scheduler.close(timeout=30 if os.environ.get("FULLBAND_CI") is None else 5)


def checked_weights(folder: Path, key: str | None, engine: str) -> None:
    """Raises ValueError for weight updates that can't be allowed."""
    if not key:
        raise ValueError("--allow-weight-updates: needs a key, so that not everybody can replace the model: give it as FULLBAND_API_KEY")
    if engine == "vllm":
        raise ValueError("--allow-weight-updates: vLLM's server has no such route; use --engine own")
    if not folder.is_dir():
        raise ValueError(f"--allow-weight-updates: {folder}: no such folder")


def listen(host: str, port: int) -> socket.socket:
    """A socket at this address. Raises ValueError where that can't be."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        made = socket.socket(family, kind)
        try:
            if os.name != "nt":  # there it lets two servers listen at one port
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
        except OSError:
            made.close()
            raise
        return made
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that no host can have
        raise ValueError(f"--host, --port: can't listen at {host}:{port}: {getattr(error, 'strerror', None) or error}") from None


def vllm_serves(model: Path) -> bool:
    """Whether vLLM is installed and the plugin serves the model as text: the top state fed to the input; an App. A model as
    `fullband convert` writes it, with heads of a width that vLLM's attention takes on every machine."""
    from importlib.util import find_spec

    from fullband.model import is_converted, is_exported, read_config, read_json_config, resolve_model_folder

    if find_spec("vllm") is None:
        return False
    folder = resolve_model_folder(model)
    if not is_converted(folder) and not (is_exported(folder) and read_config(folder).trunk.head_size % 32 == 0):
        return False
    connection = read_json_config(folder).get("connection") or {}
    return (connection.get("source", "top"), connection.get("entry", 0), connection.get("window", 1)) == ("top", 0, 1)


def hand_over_to_vllm(
    model: Path, host: str, port: int, mode: str, key: str | None, rows: int, dtype: str, playground: bool, further: Sequence[str]
) -> NoReturn:
    """Become vLLM's OpenAI server, with our page before it."""
    from fullband.cli.console import messages
    from fullband.decode import resolve_mode
    from fullband.model import resolve_model_folder

    resolve_mode(mode)
    folder = resolve_model_folder(model)
    words = ["--model", str(folder), "--served-model-name", model.resolve().name, "--host", host, "--port", str(port)]
    words += ["--dtype", dtype, "--max-num-seqs", str(rows), "--hf-overrides", json.dumps({"latent_feedback_mode": mode})]
    words += ["--middleware", "fullband.vllm.page.Playground"] if playground else []
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB; else vLLM wants nearly all memory of a machine without a GPU
    if key:
        os.environ["VLLM_API_KEY"] = key
    elif host not in LOOPBACK:
        messages().print(OPEN, soft_wrap=True)
    messages().print(f"{folder}: vLLM serves it at http://{host}:{port}, mode {mode}", soft_wrap=True)
    os.execv(sys.executable, [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words, *further])
