"""Messages of a chat: read, checked, and refused with what to do."""

from __future__ import annotations

import json
from typing import Any

from forebay.images.parts import PARTS, BadPart, read_parts
from forebay.serving.refusal import Refusal
from forebay.serving.request_fields import RequestFields

MOST_MESSAGES = 4096
# Fields of a message that templates take, and those that say nothing to a model.
TAKEN = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"}
SILENT = {"refusal", "annotations", "audio", "function_call", "provider_specific_fields", "id", "reasoning"}
IMAGE_ROLES = ("user", "tool")  # of messages that may hold images
ROLES_WITHOUT_CONTENT = ("assistant", "tool")


def read_messages(fields: RequestFields, value: Any) -> tuple[dict[str, Any], ...]:
    """The messages in a list of JSON, each with text as its content, or with parts where some are images or videos."""
    if not isinstance(value, list) or not 0 < len(value) <= MOST_MESSAGES:
        raise Refusal(400, f'messages must be a list of 1 to {MOST_MESSAGES} of {{"role": "…", "content": "…"}}',
                      "messages")
    return tuple(_message(fields, i, each) for i, each in enumerate(value))


def _message(fields: RequestFields, number: int, value: Any) -> dict[str, Any]:
    where = f"messages[{number}]"
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise Refusal(400, f'{where} must be {{"role": "…", "content": "…"}}', "messages")
    for field in sorted(value.keys() - TAKEN):
        if not _is_empty(value[field]) and field not in SILENT:
            fields.pass_over(f"{field} of {where}", "is not known here")
    calls = _tool_calls(where, value.get("tool_calls"))
    content = value.get("content")
    if value["role"] in ROLES_WITHOUT_CONTENT and content in (None, []):
        content = ""
    if isinstance(content, list):
        try:
            content = read_parts(content)
        except BadPart as error:
            raise Refusal(400, f"content of {where}: {error}", "messages") from error
    if not isinstance(content, str | list):
        raise Refusal(400, f"content of {where} must be text, or a list of {PARTS}", "messages")
    if isinstance(content, list) and (value["role"] not in IMAGE_ROLES or calls):
        raise Refusal(400, f"content of {where}: images and videos are for messages of the user", "messages")
    message: dict[str, Any] = {"role": value["role"], "content": content}
    for field in ("name", "tool_call_id", "reasoning_content"):
        said = value.get(field)
        if said is not None and not isinstance(said, str):
            raise Refusal(400, f"{field} of {where} must be text", "messages")
        if said:
            message[field] = said
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_calls(where: str, value: Any) -> list[dict[str, Any]]:
    """Calls that an assistant made, whose arguments are objects, as templates take them."""
    if value is None:
        return []
    calls = []
    for call in value if isinstance(value, list) else [{}]:
        call = call if isinstance(call, dict) else {}
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refusal(400, f'tool_calls of {where} must be a list of {{"id": "…", "type": "function", "function": '
                          '{"name": "…", "arguments": "…"}}', "messages")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = {"arguments": arguments}
        calls.append({"id": str(call.get("id") or ""), "type": "function",
                      "function": {"name": function["name"], "arguments": arguments}})
    return calls


def _is_empty(value: Any) -> bool:
    """Return whether a field of a message says nothing, as in an answer without tools."""
    parts = value.values() if isinstance(value, dict) else (value,)
    return all(part in (None, "", [], {}) for part in parts)
