"""Tools, reasoning and structured output as OpenAI's client meets them, over a random model of bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from serving.served import Running, byte_tokenizer, serving_bytes

from forebay.serving.output_fields import call_grammar
from forebay.structured_output import StructuredOutput

pytest.importorskip("llguidance")
PROMPT, NEW = 500, 120
TEMPLATE = ("{% if tools %}{% for t in tools %}[{{ t.function.name }}]{% endfor %}<tool_call>{% endif %}"
            "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
            "={{ c.function.arguments.a }}{% endfor %};{% endfor %}{% if thinking %}<think>{% endif %}{# </think> #}")
TOOLS: list[Any] = [{"type": "function", "function": {"name": name, "parameters": {
    "type": "object", "properties": {"a": {"$ref": "#/$defs/short"}}, "required": ["a"], "additionalProperties": False,
    "$defs": {"short": {"type": "string", "maxLength": 5}}}}} for name in ("add", "look")]
SCHEMA = {"type": "object", "properties": {"yes": {"type": "boolean"}, "n": {"enum": [1, 2]}}, "required": ["yes", "n"],
          "additionalProperties": False}
ASK: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving_bytes(tmp_path_factory.mktemp("bytes"), TEMPLATE, PROMPT, NEW) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_a_call_that_must_be_is_one(client: openai.OpenAI, choice: Any) -> None:
    asked: dict[str, Any] = dict(model="tiny", messages=ASK, tools=TOOLS, tool_choice=choice, seed=3)
    found = client.chat.completions.create(**asked).choices[0]
    assert found.finish_reason == "tool_calls" and found.message.content is None and found.message.tool_calls
    (call,) = found.message.tool_calls
    assert call.type == "function" and call.function.name in (["look"] if choice != "required" else ["add", "look"])
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"a"} and len(arguments["a"]) <= 5
    pieces = [piece.choices[0] for piece in client.chat.completions.create(**asked, stream=True)]
    (delta,) = [each for piece in pieces for each in piece.delta.tool_calls or ()]
    assert delta.index == 0 and delta.function is not None and pieces[-1].finish_reason == "tool_calls"
    assert (delta.function.name, delta.function.arguments) == (call.function.name, call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "fine"}
    again = client.chat.completions.create(model="tiny", messages=[*ASK, found.message, result], tools=TOOLS,
                                           max_tokens=3)
    assert again.usage is not None and again.usage.prompt_tokens == len(
        f"[add][look]<tool_call>user:hi;assistant:{call.function.name}={arguments['a']};tool:fine;".encode())


def test_references_of_each_tool_are_to_its_own_parameters() -> None:
    """Several tools may give other definitions one name, and "#" is the parameters of a tool alone."""
    called: tuple[dict[str, Any], ...] = tuple({"function": {"name": name, "parameters": {
        "type": "object", "properties": {"a": {"$ref": "#/$defs/default"}, "default": {"$ref": "#"}},
        "additionalProperties": False, "$defs": {"default": {"type": kind}}}}} for name, kind in (
            ("add", "integer"), ("look", "boolean")))
    tokenizer = byte_tokenizer()
    for tools in (called, called[:1], called[::-1]):
        structured = StructuredOutput(tokenizer, 320, [1])
        for name, value, right in (("add", "1", True), ("add", "true", False), ("look", "true", len(tools) == 2),
                                   ("look", "1", False), ("add", '{"name": "add", "arguments": {}}', False)):
            for text in (f'{{"a": {value}}}', f'{{"default": {{"a": {value}}}}}'):
                ids = tokenizer(f'{{"name": "{name}", "arguments": {text}}}').input_ids
                matcher = structured.constraint(call_grammar(tools)).matcher
                assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) is right


@pytest.mark.parametrize("format", [
    {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}},
    {"type": "json_schema", "schema": SCHEMA}])
def test_answers_hold_to_a_schema(client: openai.OpenAI, format: Any) -> None:
    for n, seed in enumerate((1, 2, 3), 1):
        found = client.chat.completions.create(model="tiny", messages=ASK, response_format=format, seed=seed, n=n)
        for choice in found.choices:
            value = json.loads(choice.message.content or "")
            assert type(value["yes"]) is bool and value["n"] in (1, 2) and choice.finish_reason == "stop"


def test_other_forms_of_structured_output(client: openai.OpenAI) -> None:
    def ask(**fields: Any) -> str:
        return client.completions.create(model="tiny", prompt="x", max_tokens=40, extra_body=fields).choices[0].text

    assert ask(guided_choice=["left", "right"]) in ("left", "right")
    assert ask(structured_outputs={"regex": "[ab]{4}"}).strip("ab") == ""
    assert ask(response_format={"type": "grammar", "grammar": 'root ::= "yes" | "no"'}) in ("yes", "no")
    for fields, says in (({"guided_regex": "("}, "response_format"), ({"response_format": {"type": "x"}}, "its type"),
                         ({"structured_outputs": {"json": {"type": "objec"}}}, "objec"),
                         ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "only one"),
                         ({"response_format": {"type": "json_schema"}}, "must be an object")):
        with pytest.raises(openai.BadRequestError, match=says):
            ask(**fields)


def test_reasoning_is_told_apart(client: openai.OpenAI) -> None:
    """Of an answer whose prompt ends within reasoning; what must be JSON is so after it."""
    asked: dict[str, Any] = dict(model="tiny", messages=ASK, seed=1, extra_body={
        "chat_template_kwargs": {"thinking": True}, "logit_bias": {str(266): 9}})
    found = client.chat.completions.create(**asked, response_format={"type": "json_schema", "schema": SCHEMA},
                                           max_tokens=NEW).choices[0]
    assert json.loads(found.message.content or "")["n"] in (1, 2)
    pieces = [piece.choices[0].delta for piece in client.chat.completions.create(**asked, stream=True, max_tokens=30)]
    whole = client.chat.completions.create(**asked, max_tokens=30).choices[0].message
    assert whole.content == "".join(piece.content or "" for piece in pieces)
    reasoning = "".join(getattr(piece, "reasoning_content", None) or "" for piece in pieces)
    assert reasoning == getattr(whole, "reasoning_content", "") and "</think>" not in (whole.content or "")


@pytest.mark.parametrize(("fields", "says"), [
    ({"tools": 5}, "tools must be"), ({"tools": [5]}, "must be an object"), ({"tools": [{"function": {}}]}, "a name"),
    ({"tools": [{"function": {"name": "f", "parameters": 5}}]}, "parameters of f"),
    ({"tools": TOOLS, "tool_choice": {"function": {"name": "none"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"), ({"response_format": 5}, "response_format")])
def test_tools_of_no_sense_are_refused(server: Running, fields: dict[str, Any], says: str) -> None:
    status, body = server.send("POST", "/v1/chat/completions", json.dumps({"messages": ASK, **fields}).encode())
    assert status == 400 and says in json.loads(body)["error"]["message"]
