"""Answers as OpenAI's API has them: whole, and as the chunks of a stream."""

from __future__ import annotations

from typing import Any


def whole(heading: dict[str, Any], chat: bool, text: str, finish: str | None, usage: dict[str, int]) -> dict[str, Any]:
    """An answer in one piece, under its `heading` (id, object, created, model)."""
    said = {"message": {"role": "assistant", "content": text, "refusal": None}} if chat else {"text": text}
    return {**heading, "choices": [{"index": 0, **said, "logprobs": None, "finish_reason": finish}], "usage": usage}


def chunk(heading: dict[str, Any], chat: bool, delta: dict[str, str], finish: str | None) -> dict[str, Any]:
    """A piece of a stream: of a chat what it adds, of a completion the text that follows."""
    said = {"delta": delta} if chat else {"text": delta.get("content", "")}
    kind = {"object": "chat.completion.chunk"} if chat else {}
    return {**heading, **kind, "choices": [{"index": 0, **said, "logprobs": None, "finish_reason": finish}]}
