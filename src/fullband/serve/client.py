"""Asking a server for answers as a trainer needs them: ids and log-probabilities. Ours, or vLLM with the plugin."""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

from fullband.decode.answers import SampledAnswer
from fullband.feedback_config import FeedbackPasses

CONNECTIONS = 64  # at once


class Client:
    """A server's API. What goes wrong is a ValueError in one line, which says what the server said."""

    def __init__(self, address: str, key: str | None = None, seconds: float = 600.0):
        """`address` such as http://127.0.0.1:8000; `seconds` that an answer may take."""
        if not address.startswith(("http://", "https://")):
            raise ValueError(f"a server's address begins with http:// or https://, not '{address}'")
        self.address, self._key, self._seconds = address.rstrip("/"), key, seconds

    @cached_property
    def _model(self) -> dict[str, Any]:
        """What the server says of its model."""
        models = self._call("/v1/models").get("data")
        if not isinstance(models, list) or not models or not isinstance(models[0], dict):
            raise ValueError(f"{self.address}: names no model")
        return models[0]

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        mode: str = "soft",
        feedback_passes: FeedbackPasses | None = None,
        n: int = 1,
        seed: int | None = None,
    ) -> list[SampledAnswer]:
        """`n` answers to each prompt (ids), prompt by prompt, sampled from the model's own distribution: temperature 1, without filters.

        seed   of the first prompt; the next ones get the next numbers. None = other answers every time
        """
        wanted = {"mode": mode} | ({} if feedback_passes is None else {"feedback_passes": feedback_passes})
        asked: dict[str, Any] = wanted if self._model.get("owned_by") == "fullband" else {"vllm_xargs": wanted}
        asked |= {"model": self._model.get("id"), "max_tokens": max_tokens, "n": n, "logprobs": 0, "return_token_ids": True}
        asked |= {"temperature": 1.0, "top_p": 1.0}
        bodies = [asked | {"prompt": list(prompt)} | ({} if seed is None else {"seed": seed + i}) for i, prompt in enumerate(prompts)]
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            replies = pool.map(lambda body: self._call("/v1/completions", body), bodies)
            return [answer for reply in replies for answer in sampled_answers(reply)]

    def put_weights(self, path: str) -> int:
        """Put the weights in `path`, below the folder that the server was started with, in the place of the served ones. Answers that were
        begun end with the old ones first. How many times that was done. For our server (`fullband serve --allow-weight-updates`)."""
        return int(self._call("/fullband/weights", {"path": path})["updates"])

    def _call(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, content, headers)
        try:
            with urllib.request.urlopen(request, timeout=self._seconds) as answer:
                found = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise ValueError(f"{self.address}{path}: {error.code}: {_message(error.read())}") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ValueError(f"{self.address}{path}: no answer ({' '.join(str(reason).split())})") from None
        if not isinstance(found, dict):
            raise ValueError(f"{self.address}{path}: the answer is no JSON object")
        return found


def sampled_answers(reply: Any) -> list[SampledAnswer]:
    """The answers in a reply of /v1/completions, asked for with `return_token_ids` and `logprobs`. Raises ValueError for another reply."""
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or not choices:
        raise ValueError("no reply of /v1/completions: it has no choices")
    found = []
    for number, choice in enumerate(choices):
        try:
            prompt, tokens, logprobs = choice["prompt_token_ids"], choice["token_ids"], choice["logprobs"]["token_logprobs"]
        except (KeyError, TypeError):
            raise ValueError(f"choice {number}: ask for it with return_token_ids true and logprobs 0") from None
        if not all(isinstance(ids, list) and all(type(token) is int for token in ids) for ids in (prompt, tokens)):
            raise ValueError(f"choice {number}: prompt_token_ids and token_ids must be lists of ids")
        if not isinstance(logprobs, list) or not all(isinstance(value, int | float) and math.isfinite(value) for value in logprobs):
            raise ValueError(f"choice {number}: token_logprobs must be a list of numbers")
        if len(tokens) != len(logprobs):
            raise ValueError(f"choice {number}: has {len(tokens)} token_ids and {len(logprobs)} token_logprobs (leave out echo)")
        found.append(SampledAnswer(prompt, tokens, [float(value) for value in logprobs]))
    return found


def _message(content: bytes) -> str:
    """What an error says, in one line."""
    try:
        error = json.loads(content)
        error = error.get("error", error)
        text = str(error["message"] if isinstance(error, dict) and "message" in error else error)
    except (ValueError, AttributeError):
        text = content.decode(errors="replace")
    return " ".join(text.split())[:500]
