"""Anthropic's messages: requests as chat completions, and answers in blocks."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from forebay.serving.choices import AnswerChoice, Delta, Usage
from forebay.serving.openai_replies import event
from forebay.serving.refusal import Refusal

RENAMED = {"stop_sequences": "stop"}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
STOPS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


def chat_of_messages(body: dict[str, Any]) -> dict[str, Any]:
    """The body of a chat completion that asks for the same."""
    chat = {RENAMED.get(name, name): value for name, value in body.items()
            if name not in ("system", "messages", "tools", "tool_choice", "thinking")}
    said = body.get("messages")
    messages: list[Any] = []
    if system := body.get("system"):
        messages.append({"role": "system", "content": system})
    for message in said if isinstance(said, list) else [said]:
        messages += _messages(message)
    chat["messages"] = messages
    tools = body.get("tools")
    if isinstance(tools, list):
        chat["tools"] = [_tool(tool) for tool in tools]
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        kind = choice.get("type")
        chat["tool_choice"] = {"name": choice.get("name")} if kind == "tool" else CHOICES.get(str(kind), choice)
    thinking = body.get("thinking")
    if isinstance(thinking, dict):
        chat["enable_thinking"] = thinking.get("type") != "disabled"
    return chat


def _tool(tool: Any) -> Any:
    if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
        return tool
    return {"type": "function", "function": {"name": tool.get("name"), "description": tool.get("description"),
                                             "parameters": tool.get("input_schema")}}


def _messages(message: Any) -> list[Any]:
    """The messages of a chat that hold the blocks of one."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return [message]
    results, parts, calls, reasoning = [], [], [], ""
    for block in message["content"]:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            calls.append({"id": block.get("id"), "type": "function", "function": {
                "name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}})
        elif kind == "tool_result":
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")})
        elif kind == "thinking":
            reasoning += str(block.get("thinking") or "")
        elif kind != "redacted_thinking":
            parts.append(block)
    if results and not parts:
        return results
    said = {"role": message.get("role"), "content": parts, **({"tool_calls": calls} if calls else {}),
            **({"reasoning_content": reasoning} if reasoning else {})}
    return [*results, said]


class MessageReply:
    """An answer as a message of blocks: thinking, text and uses of tools."""

    def __init__(self, model: str) -> None:
        self.heading: dict[str, Any] = {"id": "msg_" + secrets.token_hex(12), "type": "message", "role": "assistant",
                                        "model": model}
        self._open: str | None = None  # kind of the block that is streamed
        self._blocks = 0
        self._choice = AnswerChoice()

    def begin(self, prompt_tokens: int) -> Iterator[bytes]:
        yield self._event("message_start", message={
            **self.heading, "content": [], "stop_reason": None, "stop_sequence": None,
            "usage": {"input_tokens": prompt_tokens, "output_tokens": 0}})

    def more(self, index: int, delta: Delta) -> Iterator[bytes]:
        if delta.reasoning:
            yield from self._begin("thinking", {"thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.content:
            yield from self._begin("text", {"text": ""})
            yield self._delta({"type": "text_delta", "text": delta.content})
        if (call := delta.call) is not None:
            yield from self._close()
            yield from self._begin("tool_use", {"id": f"toolu_{call.id}", "name": call.name, "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def ended(self, index: int, choice: AnswerChoice) -> Iterator[bytes]:
        self._choice = choice
        yield from self._close()

    def end(self, usage: Usage) -> Iterator[bytes]:
        yield self._event("message_delta", delta=_stop(self._choice), usage=_usage(usage))
        yield self._event("message_stop")

    def failed(self, refusal: Refusal) -> Iterator[bytes]:
        yield event(refusal.body(), "error")

    def whole(self, choices: Sequence[AnswerChoice], usage: Usage) -> dict[str, Any]:
        choice, blocks = choices[0], []
        if choice.reasoning:
            blocks.append({"type": "thinking", "thinking": choice.reasoning, "signature": ""})
        if choice.content or not choice.calls:
            blocks.append({"type": "text", "text": choice.content})
        blocks += [{"type": "tool_use", "id": f"toolu_{call.id}", "name": call.name, "input": _object(call.arguments)}
                   for call in choice.calls]
        return {**self.heading, "content": blocks, **_stop(choice), "usage": _usage(usage)}

    def _begin(self, kind: str, empty: dict[str, Any]) -> Iterator[bytes]:
        if self._open != kind:
            yield from self._close()
            self._open = kind
            yield self._event("content_block_start", index=self._blocks, content_block={"type": kind, **empty})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return self._event("content_block_delta", index=self._blocks, delta=delta)

    def _close(self) -> Iterator[bytes]:
        if self._open is not None:
            self._open = None
            yield self._event("content_block_stop", index=self._blocks)
            self._blocks += 1

    def _event(self, name: str, **fields: Any) -> bytes:
        return event({"type": name, **fields}, name)


def _usage(usage: Usage) -> dict[str, int]:
    """Numbers of tokens, as Anthropic's API has them: those of a prompt that were known before count by themselves."""
    cached = {"cache_read_input_tokens": usage.cached} if usage.cached else {}
    return {"input_tokens": usage.prompt - usage.cached, **cached, "output_tokens": usage.completion}


def _stop(choice: AnswerChoice) -> dict[str, Any]:
    if choice.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop}
    return {"stop_reason": STOPS.get(choice.finish or "stop", "end_turn"), "stop_sequence": None}


def _object(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return {"arguments": arguments}
