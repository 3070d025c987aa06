"""Errors as OpenAI's API gives them."""

from __future__ import annotations

from starlette.responses import JSONResponse, Response


class APIError(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", headers: dict[str, str] | None = None):
        line = " ".join(message.split())  # a client's own words may be among them
        super().__init__(line if len(line) <= 500 else f"{line[:499]}…")
        self.status, self.kind, self.headers = status, kind, headers

    def response(self) -> Response:
        error = {"message": str(self), "type": self.kind, "param": None, "code": None}
        return JSONResponse({"error": error}, self.status, self.headers)
