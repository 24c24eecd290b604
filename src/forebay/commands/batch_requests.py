"""Lines of OpenAI's batch files: requests as they are sent to its API."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from forebay.runtime.run.sampling import Sampling
from forebay.serving.dialects.openai_responses import chat_of_response
from forebay.serving.refusal import Refusal
from forebay.serving.requests import Inquiry, read_inquiry
from forebay.structured_output import check_grammar

CHATS, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


@dataclass(frozen=True)
class BatchRequest:
    """The request of a line: the `url` that it is for, and its `body`."""

    url: str
    body: dict[str, Any]

    @property
    def digest(self) -> str:
        """An id of the request."""
        return hashlib.sha256(json.dumps([self.url, self.body], sort_keys=True).encode()).hexdigest()[:32]

    def inquiry(self, sampling: Sampling) -> Inquiry:
        """Read the body of a request, with `sampling` for the fields that it lacks; ValueError if it cannot be
        answered."""
        body = {**self.body, "stream": False}
        try:
            body = chat_of_response(body) if self.url == RESPONSES else body
            inquiry = read_inquiry(body, str(body.get("model") or ""), chat=self.url != COMPLETIONS, sampling=sampling)
        except Refusal as error:
            raise ValueError(error.message) from error
        if len(inquiry.prompts) > 1 or any(not isinstance(prompt, str) for prompt in inquiry.prompts):
            raise ValueError("prompt must be one text; give each a line of its own")
        if inquiry.grammar is not None:
            check_grammar(inquiry.grammar)
        return inquiry


def read_batch_request(entry: dict[str, Any]) -> BatchRequest:
    """The request of a line; ValueError if there is none."""
    if not isinstance(entry["custom_id"], str) or not entry["custom_id"]:
        raise ValueError("custom_id must be text")
    if entry.get("method", "POST") != "POST" or entry.get("url", CHATS) not in (CHATS, COMPLETIONS, RESPONSES):
        raise ValueError(f"method and url must be POST and one of {CHATS}, {COMPLETIONS} and {RESPONSES}")
    if not isinstance(entry.get("body"), dict):
        raise ValueError("body must be an object")
    return BatchRequest(entry.get("url", CHATS), entry["body"])
