"""Refusals of requests that a server does not answer."""

from __future__ import annotations

from typing import Any


class Refusal(Exception):
    """A request that is not answered: the HTTP `status`, what to do, and the `field` of the request that is to blame.
    """

    def __init__(self, status: int, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.field, self.code = status, message, field, code

    def body(self) -> dict[str, Any]:
        """Return the body in the form of OpenAI's and Anthropic's clients."""
        kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.field, "code": self.code}
        return {"type": "error", "error": error}
