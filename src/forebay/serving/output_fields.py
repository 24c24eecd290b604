"""Fields of a request that say what its answer must be: `tools` with `tool_choice`, and structured output as OpenAI,
vLLM and llama.cpp have it."""

from __future__ import annotations

import json
from typing import Any

from forebay.serving.refusal import Refusal
from forebay.serving.request_fields import RequestFields
from forebay.structured_output import ANY_OBJECT, OutputGrammar, StructuredOutputError

MOST_TOOLS = 512
GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
          "json_schema": "json", "grammar": "grammar"}  # fields of vLLM and of llama.cpp
OUTPUT_FIELDS = {"tools", "tool_choice", "response_format", "structured_outputs", *GUIDED}


def read_tools(fields: RequestFields) -> tuple[tuple[dict[str, Any], ...], tuple[dict[str, Any], ...]]:
    """The functions that the model may call, in OpenAI's form, and those that it must choose a call from."""
    given = fields.get("tools") or []
    if not isinstance(given, list) or len(given) > MOST_TOOLS:
        raise Refusal(400, f"tools must be a list of at most {MOST_TOOLS}", "tools")
    tools = tuple(tool for each in given if (tool := _tool(fields, each)) is not None)
    choice = fields.get("tool_choice")
    if choice == "none":
        return (), ()
    if choice is None or choice == "auto" or not tools:
        return tools, ()
    if choice in ("required", "any"):
        return tools, tools
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else choice.get("name")
        called = tuple(tool for tool in tools if tool["function"]["name"] == name)
        if called:
            return tools, called
        if choice.get("type") == "allowed_tools":
            fields.pass_over("tool_choice", "is not served as allowed_tools")
            return tools, ()
    raise Refusal(400, "tool_choice must be none, auto, required, or the name of one of the tools", "tool_choice")


def _tool(fields: RequestFields, value: Any) -> dict[str, Any] | None:
    """A tool as templates take it; None for one that only a provider runs."""
    if not isinstance(value, dict):
        raise Refusal(400, "each of the tools must be an object", "tools")
    kind = value.get("type", "function")
    if kind != "function":
        fields.pass_over("tools", f"of type {str(kind)[:40]} are not served")
        return None
    function = value.get("function", value)  # the responses API has no inner object
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise Refusal(400, "each of the tools must have a name", "tools")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise Refusal(400, f"parameters of {function['name'][:80]} must be a JSON schema", "tools")
    return {"type": "function", "function": {
        "name": function["name"], "description": function.get("description") or "",
        "parameters": parameters or {"type": "object", "properties": {}}}}


def call_grammar(called: tuple[dict[str, Any], ...]) -> OutputGrammar:
    """The grammar of a call of one of these tools, as JSON with name and arguments."""
    calls, arguments = [], dict[str, Any]()
    for number, tool in enumerate(called):
        arguments[f"{number}"] = _moved(tool["function"]["parameters"], f"#/$defs/{number}")
        calls.append({"type": "object", "additionalProperties": False, "required": ["name", "arguments"],
                      "properties": {"name": {"const": tool["function"]["name"]},
                                     "arguments": {"$ref": f"#/$defs/{number}"}}})
    return OutputGrammar.of_schema({**(calls[0] if len(calls) == 1 else {"anyOf": calls}), "$defs": arguments})


def _moved(schema: Any, to: str) -> Any:
    """A schema whose references are to its own parts once it stands elsewhere in another."""
    if isinstance(schema, list):
        return [_moved(each, to) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {name: f"{to}{value[1:]}" if name == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, to) for name, value in schema.items()}


def read_grammar(fields: RequestFields) -> OutputGrammar | None:
    """Read the grammar that an answer must follow; None: any text."""
    said = fields.mapping("response_format")
    kind, where = said.get("type", "text"), "response_format"
    guided = {GUIDED[name]: value for name, value in fields.given.items() if name in GUIDED}
    outputs = fields.mapping("structured_outputs") or guided
    try:
        if kind == "json_object" and not outputs:
            schema = said.get("schema")  # of llama.cpp
            return OutputGrammar.of_schema(ANY_OBJECT if schema is None else schema)
        if kind == "json_schema":
            inner = said.get("json_schema", said)
            return OutputGrammar.of_schema(inner.get("schema") if isinstance(inner, dict) else None)
        if kind in ("regex", "grammar"):
            outputs = {kind: next((said[name] for name in (kind, "pattern", "definition") if name in said), None)}
        elif kind not in ("text", "json_object"):
            raise StructuredOutputError("its type must be text, json_object, json_schema, regex or grammar")
        elif outputs:
            where = "structured_outputs"
        return _guided(outputs)
    except StructuredOutputError as error:
        raise Refusal(400, f"{where}: {error}", where) from error


def _guided(said: dict[str, Any]) -> OutputGrammar | None:
    """A grammar as vLLM names it: json, regex, choice or grammar."""
    asked = {name: value for name, value in said.items() if name in ("json", "json_object", "regex", "choice",
                                                                    "grammar") and value not in (None, False, "")}
    if len(asked) > 1:
        raise StructuredOutputError("only one of json, regex, choice and grammar may be given")
    for name, value in asked.items():
        if name == "json_object":
            return OutputGrammar.of_schema(ANY_OBJECT)
        if name == "json":
            try:
                return OutputGrammar.of_schema(json.loads(value) if isinstance(value, str) else value)
            except ValueError as error:
                raise StructuredOutputError(f"{error}") from error
        if name == "choice":
            if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
                raise StructuredOutputError("choice must be a list of texts")
            return OutputGrammar.of_choices(value)
        if not isinstance(value, str):
            raise StructuredOutputError(f"{name} must be text")
        return OutputGrammar("regex" if name == "regex" else "grammar", value)
    return None
