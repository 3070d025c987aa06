"""The playground in front of vLLM's OpenAI server: `--middleware fullband.vllm.page.Playground`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.responses import HTMLResponse, JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from fullband.data.chat_template import load_chat_template
from fullband.serve.page import playground


class Playground:
    """Answers GET / with the page and GET /fullband/about with what the page asks first; the rest is vLLM's. vLLM's API gives no states, so
    the page leaves out the views that need them, and says so."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answers = {"/": _page, "/fullband/about": _about}
        answer = answers.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "GET" else None
        await (self.app if answer is None else answer(scope))(scope, receive, send)


def _page(scope: Scope) -> ASGIApp:
    return HTMLResponse(playground())


def _about(scope: Scope) -> ASGIApp:
    state = scope["app"].state
    model = state.vllm_config.model_config
    return JSONResponse(
        {
            "engine": "vllm",
            "model": _served_name(state.args.served_model_name, model.model),
            "chat": state.args.chat_template is not None or load_chat_template(Path(model.model)).is_own,
            "mode": model.hf_config.latent_feedback_mode,
            "max_model_len": model.max_model_len,
            "states": False,
            "task": None,
        }
    )


def _served_name(given: Any, folder: str) -> str:
    """As vLLM names it."""
    return str((given if isinstance(given, str) else given[0]) if given else folder)
