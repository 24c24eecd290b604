"""Anthropic's messages and OpenAI's responses: the same answers as of chats, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from serving.served import Running

from forebay.serving.choices import AnswerChoice, Delta, ToolCall, Usage
from forebay.serving.dialects.anthropic_messages import MessageReply, chat_of_messages
from forebay.serving.dialects.openai_responses import ResponseReply, chat_of_response
from forebay.serving.refusal import Refusal
from forebay.serving.requests import read_inquiry

CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CHAT = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "so", "tool_calls": [CALL]},
        {"role": "tool", "content": "3", "tool_call_id": "c"}, {"role": "user", "content": "and?"})
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
ASK = {"messages": [{"role": "w3", "content": "w4 w5"}], "max_tokens": 6, "temperature": 0}


def events(body: bytes) -> list[dict[str, Any]]:
    """Events of a stream, each under the name that its data has."""
    found = []
    for event in body.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def post(server: Running, path: str, **fields: Any) -> tuple[int, bytes]:
    return server.send("POST", path, json.dumps(fields).encode())


def test_messages_ask_what_a_chat_asks() -> None:
    body = {"system": [{"type": "text", "text": "be brief"}], "max_tokens": 9, "stop_sequences": ["x"], "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "so"}, {
            "type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [
            {"type": "text", "text": "3"}]}, {"type": "text", "text": "and?"}]}],
        "tools": [{"name": "add", "description": "adds", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "add"}, "thinking": {"type": "disabled"}, "metadata": {"user_id": "me"}}
    found = read_inquiry(chat_of_messages(body), "tiny", chat=True, strict=True)
    assert (found.messages, found.new_tokens, found.stops) == (CHAT, 9, ("x",))
    assert found.tools == found.called == (TOOL,) and found.template == {"enable_thinking": False}


def test_responses_ask_what_a_chat_asks() -> None:
    body = {"instructions": "be brief", "max_output_tokens": 9, "store": True, "reasoning": {"effort": "low"},
            "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so", "annotations": []}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "3"}, {"role": "user", "content": "and?"}],
        "tools": [{"type": "function", "name": "add", "description": "adds", "parameters": {"type": "object"},
                   "strict": True}], "text": {"format": {"type": "text"}}}
    found = read_inquiry(chat_of_response(body), "tiny", chat=True, strict=True)
    assert (found.messages, found.new_tokens, found.tools, found.called) == (CHAT, 9, (TOOL,), ())
    assert found.template == {"reasoning_effort": "low"}
    with pytest.raises(Refusal, match="previous_response_id"):
        chat_of_response({"input": "hi", "previous_response_id": "resp_1"})


@pytest.mark.parametrize("translate", [chat_of_messages, chat_of_response])
@pytest.mark.parametrize("said", [None, 5, "x", [5], [[]], [{"role": 5}], [{"content": []}], [{"content": [5]}],
                                  [{"type": "function_call"}], [{"type": "x"}], [{"role": "user", "content": [{}]}]])
def test_bodies_of_no_sense_are_refused(translate: Any, said: Any) -> None:
    body = {"messages": said, "input": said, "tools": said, "tool_choice": {"type": said}, "system": 5}
    with pytest.raises(Refusal):
        read_inquiry(translate(body), "tiny", chat=True)


def test_answers_are_those_of_chats(server: Running) -> None:
    text = json.loads(post(server, "/v1/chat/completions", **ASK)[1])["choices"][0]["message"]["content"]
    message = json.loads(post(server, "/v1/messages", **ASK)[1])
    assert message["content"] == [{"type": "text", "text": text}] and message["stop_reason"] == "max_tokens"
    assert message["usage"] == {"input_tokens": 4, "output_tokens": 6} and message["type"] == "message"
    stop = text.split()[2]
    cut = json.loads(post(server, "/v1/messages", **ASK, stop_sequences=["zz", stop])[1])
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", stop)
    assert json.loads(post(server, "/v1/messages/count_tokens", **ASK)[1]) == {"input_tokens": 4}
    streamed = events(post(server, "/v1/messages", **ASK, stream=True)[1])
    assert [each["type"] for each in (*streamed[:2], *streamed[-3:])] == [
        "message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    assert "".join(each["delta"]["text"] for each in streamed[2:-3]) == text
    assert streamed[-2]["usage"]["output_tokens"] == 6 and streamed[-2]["delta"]["stop_reason"] == "max_tokens"
    status, body = post(server, "/v1/messages", messages=5)
    assert status == 400 and json.loads(body)["type"] == "error"


def test_openais_client_reads_responses(server: Running) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
    asked: dict[str, Any] = dict(model="tiny", input=ASK["messages"], max_output_tokens=6, temperature=0)
    assert client.responses.input_tokens.count(model="tiny", input=ASK["messages"]).input_tokens == 4  # type: ignore
    whole = client.responses.create(**asked)
    text = json.loads(post(server, "/v1/chat/completions", **ASK)[1])["choices"][0]["message"]["content"]
    assert whole.output_text == text and whole.status == "incomplete" and whole.usage is not None
    assert whole.incomplete_details is not None and whole.incomplete_details.reason == "max_output_tokens"
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (4, 6)
    streamed = list(client.responses.create(**asked, stream=True))
    assert [each.sequence_number for each in streamed] == list(range(len(streamed)))
    assert "".join(each.delta for each in streamed if each.type == "response.output_text.delta") == text
    assert streamed[-1].type == "response.incomplete" and streamed[-1].response.output_text == text
    assert client.responses.create(model="tiny", input="w4", max_output_tokens=1).usage.output_tokens == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("form", [MessageReply, ResponseReply])
def test_parts_of_an_answer_are_streamed_as_they_are_whole(form: Any) -> None:
    def reply() -> Any:
        return form("tiny") if form is MessageReply else form("tiny", {})

    deltas = [Delta(reasoning="h"), Delta(reasoning="m"), Delta("so"), Delta(" be it"),
              Delta(call=ToolCall("a1", "add", '{"a": 1}')), Delta(call=ToolCall("a2", "add", "{}"))]
    choice, usage, streaming = AnswerChoice(finish="tool_calls"), Usage(3, 9), reply()
    body = b"".join(streaming.begin(3))
    for delta in deltas:
        choice.add(delta)
        body += b"".join(streaming.more(0, delta))
    body += b"".join((*streaming.ended(0, choice), *streaming.end(usage)))
    said, whole = events(body), reply().whole([choice], usage)
    if form is MessageReply:
        blocks = [each["content_block"] for each in said if each["type"] == "content_block_start"]
        assert [b["type"] for b in blocks] == [b["type"] for b in whole["content"]] == [
            "thinking", "text", "tool_use", "tool_use"]
        assert [each["index"] for each in said if each["type"] == "content_block_stop"] == [0, 1, 2, 3]
        assert whole["content"][2]["input"] == {"a": 1} and whole["stop_reason"] == "tool_use"
        assert said[-2]["delta"]["stop_reason"] == "tool_use"
        return
    items = [[{**item, "id": ""} for item in each["output"]] for each in (said[-1]["response"], whole)]
    assert items[0] == items[1] and [item["type"] for item in items[0]] == [
        "reasoning", "message", "function_call", "function_call"]
    assert said[-1]["type"] == "response.completed"
    assert [each["item"]["type"] for each in said if each["type"] == "response.output_item.done"] == [
        item["type"] for item in items[0]]
