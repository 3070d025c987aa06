"""Bodies of requests: within a size and a time, and JSON."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

from starlette.requests import Request

from fullband.serve.errors import APIError
from fullband.serve.schemas import MOST_FIELDS


async def read_body(http: Request, most: int, seconds: float) -> dict[str, Any]:
    """The JSON object of a request. Raises APIError for one of more than `most` bytes, that takes longer, or is none."""
    content, too_large = bytearray(), APIError(413, f"the request's body must be at most {most} bytes")
    if int(http.headers.get("content-length") or 0) > most:
        raise too_large
    try:
        async with asyncio.timeout(seconds):
            async for part in http.stream():
                content += part
                if len(content) > most:
                    raise too_large
    except TimeoutError:
        raise APIError(408, "the request's body did not arrive in time") from None
    try:
        body = read_json(bytes(content))
    except (ValueError, RecursionError):
        raise APIError(400, "the request's body is not valid JSON") from None
    if not isinstance(body, dict):
        raise APIError(400, "the request's body must be a JSON object")
    if len(body) > MOST_FIELDS:
        raise APIError(400, f"the request's body must have at most {MOST_FIELDS} fields, got {len(body)}")
    return body


def read_json(content: bytes) -> Any:
    """Raises ValueError and RecursionError for what is none, or holds half a surrogate pair, which no tokenizer takes."""
    collects = gc.isenabled()
    gc.disable()  # which looks at millions of lists again and again, seconds long
    try:
        body = json.loads(content.decode("utf-8-sig"))
    finally:
        if collects:
            gc.enable()
    if b"\\u" in content:
        json.dumps(body, ensure_ascii=False).encode()
    return body
