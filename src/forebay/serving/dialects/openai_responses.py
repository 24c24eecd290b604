"""OpenAI's responses: requests as chat completions, and answers as lists of items. Nothing is stored."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from forebay.serving.choices import AnswerChoice, Delta, ToolCall, Usage
from forebay.serving.openai_replies import event
from forebay.serving.refusal import Refusal

RENAMED = {"max_output_tokens": "max_completion_tokens"}
# Fields that change no answer here; what `include` adds to one is of tools that a provider runs.
IDLE = {"include", "truncation", "background", "stream_options", "max_tool_calls", "conversation", "prompt"}
TRANSLATED = {"input", "instructions", "text", "reasoning", "previous_response_id"}


def chat_of_response(body: dict[str, Any]) -> dict[str, Any]:
    """The body of a chat completion that asks for the same; Refusal for one that goes on from a stored answer."""
    if body.get("previous_response_id") is not None:
        raise Refusal(400, "previous_response_id is not served, since answers are not stored; send the whole "
                      "conversation as input", "previous_response_id")
    chat = {RENAMED.get(name, name): value for name, value in body.items() if name not in IDLE | TRANSLATED}
    text, reasoning = body.get("text"), body.get("reasoning")
    if isinstance(text, dict) and text.get("format") is not None:
        chat["response_format"] = text["format"]
    if isinstance(reasoning, dict) and reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    messages: list[Any] = []
    if instructions := body.get("instructions"):
        messages.append({"role": "system", "content": instructions})
    said = body.get("input")
    for item in said if isinstance(said, list) else [{"role": "user", "content": said}]:
        _add_item(messages, item)
    chat["messages"] = messages
    return chat


def _add_item(messages: list[Any], item: Any) -> None:
    """Append what an item of the input says; calls of an assistant go to its last message."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "function_call":
        if not messages or messages[-1].get("role") != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append({"id": item.get("call_id"), "type": "function", "function": {
            "name": item.get("name"), "arguments": item.get("arguments")}})
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
    elif kind == "message":
        messages.append({"role": item.get("role"), "content": item.get("content")})
    elif kind != "reasoning":
        raise Refusal(400, f"input of type {str(kind)[:40]} is not served; use messages and function calls", "input")


class ResponseReply:
    """An answer as items: reasoning, a message, and calls of functions."""

    def __init__(self, model: str, body: dict[str, Any]) -> None:
        asked = {name: body.get(name) for name in ("instructions", "max_output_tokens", "temperature", "top_p")}
        self.heading: dict[str, Any] = {
            "id": "resp_" + secrets.token_hex(12), "object": "response", "created_at": int(time.time()), "model": model,
            "error": None, "incomplete_details": None, "metadata": body.get("metadata") or {}, **asked,
            "parallel_tool_calls": True, "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [], "text": body.get("text") or {"format": {"type": "text"}},
            "truncation": "disabled", "previous_response_id": None}
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the item that is streamed
        self._choice = AnswerChoice()

    def begin(self, prompt_tokens: int) -> Iterator[bytes]:
        for name in ("created", "in_progress"):
            yield self._event(name, response={**self.heading, "status": "in_progress", "output": [], "usage": None})

    def more(self, index: int, delta: Delta) -> Iterator[bytes]:
        if delta.reasoning:
            yield from self._text("reasoning", delta.reasoning)
        if delta.content:
            yield from self._text("message", delta.content)
        if delta.call is not None:
            yield from self._close()
            item = _call(delta.call)
            at = {"item_id": item["id"], "output_index": len(self._items)}
            yield self._event("output_item.added", item={**item, "arguments": "", "status": "in_progress"},
                              output_index=len(self._items))
            yield self._event("function_call_arguments.delta", **at, delta=item["arguments"])
            yield self._event("function_call_arguments.done", **at, arguments=item["arguments"], name=item["name"])
            yield self._event("output_item.done", item=item, output_index=len(self._items))
            self._items.append(item)

    def ended(self, index: int, choice: AnswerChoice) -> Iterator[bytes]:
        self._choice = choice
        yield from self._close()

    def end(self, usage: Usage) -> Iterator[bytes]:
        response = self._response(self._items, self._choice, usage)
        yield self._event(response["status"], response=response)

    def failed(self, refusal: Refusal) -> Iterator[bytes]:
        error = {"code": "server_error", "message": refusal.message}
        yield self._event("failed", response={**self.heading, "status": "failed", "error": error, "output": [],
                                              "usage": None})

    def whole(self, choices: Sequence[AnswerChoice], usage: Usage) -> dict[str, Any]:
        choice, items = choices[0], []
        if choice.reasoning:
            items.append(_text_item("reasoning", choice.reasoning))
        if choice.content or not choice.calls:
            items.append(_text_item("message", choice.content))
        return self._response([*items, *map(_call, choice.calls)], choice, usage)

    def _response(self, items: list[dict[str, Any]], choice: AnswerChoice, usage: Usage) -> dict[str, Any]:
        cut = choice.finish == "length"
        return {**self.heading, "status": "incomplete" if cut else "completed", "output": items,
                "incomplete_details": {"reason": "max_output_tokens"} if cut else None, "usage": {
                    "input_tokens": usage.prompt, "input_tokens_details": {
                        "cached_tokens": usage.cached, "cache_write_tokens": 0},
                    "output_tokens": usage.completion, "output_tokens_details": {"reasoning_tokens": 0},
                    "total_tokens": usage.prompt + usage.completion}}

    def _text(self, kind: str, text: str) -> Iterator[bytes]:
        """More text of an item of this kind, which begins with it where another is open."""
        if self._open is None or self._open["type"] != kind:
            yield from self._close()
            item = self._open = _text_item(kind, "")
            yield self._event("output_item.added", item={**item, "content": [], "status": "in_progress"},
                              output_index=len(self._items))
            yield self._event("content_part.added", **self._at(item), part=item["content"][0])
        part = self._open["content"][0]
        part["text"] += text
        yield self._event(f"{part['type']}.delta", **self._at(self._open), delta=text, **_logprobs(kind))

    def _close(self) -> Iterator[bytes]:
        if (item := self._open) is not None:
            part, at = item["content"][0], self._at(item)
            yield self._event(f"{part['type']}.done", **at, text=part["text"], **_logprobs(item["type"]))
            yield self._event("content_part.done", **at, part=part)
            yield self._event("output_item.done", item=item, output_index=len(self._items))
            self._items.append(item)
            self._open = None

    def _at(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self._items), "content_index": 0}

    def _event(self, name: str, /, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": f"response.{name}", "sequence_number": self._number - 1, **fields}, f"response.{name}")


def _logprobs(kind: str) -> dict[str, list[Any]]:
    return {"logprobs": []} if kind == "message" else {}


def _text_item(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"id": "rs_" + secrets.token_hex(12), "type": kind, "summary": [], "status": "completed",
                "content": [{"type": "reasoning_text", "text": text}]}
    return {"id": "msg_" + secrets.token_hex(12), "type": kind, "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": f"fc_{call.id}", "type": "function_call", "call_id": f"call_{call.id}", "name": call.name,
            "arguments": call.arguments, "status": "completed"}
