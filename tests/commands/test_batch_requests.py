"""OpenAI's batch files run as they are, and a schema of a job holds for its answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from serving.served import save_byte_model
from typer.testing import CliRunner

from forebay.commands.app import app
from forebay.commands.prompts import read_requests

SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
HI = [{"role": "developer", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytes")
    save_byte_model(folder, "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}<tool_call>")
    return folder


def line(name: str, body: dict[str, Any], url: str = "/v1/chat/completions", **fields: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "gpt-5", **body}, **fields}


def run(folder: Path, at: Path, lines: list[Any], *options: str) -> tuple[int, str, dict[str, Any]]:
    """Exit code and what is said of a job, and by id the lines of its output."""
    (at / "in.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    said = CliRunner().invoke(app, ["run", str(folder), "--prompts", str(at / "in.jsonl"), "--output",
                                    str(at / "out.jsonl"), "--budget", "9MB", "--new-tokens", "12", "--batch", "4",
                                    *options])
    found = [json.loads(each) for each in (at / "out.jsonl").read_text().splitlines()] if (
        at / "out.jsonl").exists() else []
    assert len({each["id"] for each in found}) == len(found)
    return said.exit_code, said.output, {each.get("custom_id", each["id"]): each for each in found}


def test_a_batch_file_runs_as_it_is(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    lines = [
        line("plain", {"messages": HI, "max_tokens": 5}), line("twice", {"messages": HI, "n": 2, "seed": 1,
                                                                         "temperature": 1, "max_tokens": 7}),
        line("probable", {"messages": HI, "logprobs": True, "top_logprobs": 2, "max_completion_tokens": 3}),
        line("called", {"messages": HI, "tools": [TOOL], "tool_choice": "required", "max_tokens": 60}),
        line("schema", {"messages": HI, "max_tokens": 30, "response_format": {
            "type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}),
        line("text", {"prompt": "ab", "stop": ["@"], "max_tokens": 6}, "/v1/completions"),
        line("response", {"input": "hi", "max_output_tokens": 4}, "/v1/responses")]
    code, said, found = run(folder, tmp_path, lines)
    assert code == 0, said
    assert set(found) == {each["custom_id"] for each in lines}
    bodies = {name: each["response"]["body"] for name, each in found.items()}
    assert all(each["response"]["status_code"] == 200 and each["error"] is None for each in found.values())
    chats = {name: ChatCompletion.model_validate(bodies[name]) for name in (
        "plain", "twice", "probable", "called", "schema")}
    assert chats["plain"].usage is not None and chats["plain"].usage.completion_tokens == 5
    texts = [choice.message.content for choice in chats["twice"].choices]
    assert len(texts) == 2 and texts[0] != texts[1]
    (probable,) = chats["probable"].choices
    assert probable.logprobs is not None and len(probable.logprobs.content or ()) == 3
    (call,) = chats["called"].choices[0].message.tool_calls or ()
    assert call.type == "function" and json.loads(call.function.arguments)["n"] in (1, 2)
    assert json.loads(chats["schema"].choices[0].message.content or "")["n"] in (1, 2)
    assert "@" not in Completion.model_validate(bodies["text"]).choices[0].text
    assert Response.model_validate(bodies["response"]).status in ("completed", "incomplete")
    code, said, again = run(folder, tmp_path, lines)
    assert code == 0 and "7 of 7 prompts are answered already" in said and again == found
    lines[0]["body"]["max_tokens"] = 6
    code, said, _ = run(folder, tmp_path, lines)
    assert code == 2 and "'plain' is in" in said and "another question" in said


@pytest.mark.parametrize(("entry", "says"), [
    (line("a", {"messages": []}), "messages must be"), (line("a", {"messages": HI, "temperature": 5}), "temperature"),
    (line("a", {"messages": HI}, "/v1/embeddings"), "method and url"), (line("a", {}, method="GET"), "method and url"),
    ({"custom_id": 3, "body": {}}, "custom_id must be text"), ({"custom_id": "a", "body": 5}, "body must be an object"),
    (line("a", {"prompt": ["x", "y"]}, "/v1/completions"), "one text"),
    (line("a", {"input": "x", "previous_response_id": "r"}, "/v1/responses"), "previous_response_id"),
    (line("a", {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {
        "schema": {"type": "objec"}}}}), "objec")])
def test_lines_that_cannot_be_answered_are_named(tmp_path: Path, entry: dict[str, Any], says: str) -> None:
    pytest.importorskip("llguidance")
    (tmp_path / "in.jsonl").write_text(json.dumps(entry) + "\n")
    requests, (bad,) = read_requests(tmp_path / "in.jsonl")
    assert not requests and says in bad.reason


def test_a_schema_holds_for_the_answers_of_a_job(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    (schema := tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    lines = [{"prompt": "one"}, {"prompt": "two"}, {"prompt": "three"}]
    code, said, found = run(folder, tmp_path, lines, "--json-schema", str(schema), "--sample")
    assert code == 0 and len(found) == 3, said
    assert all(json.loads(each["text"])["n"] in (1, 2) for each in found.values())
    code, said, _ = run(folder, tmp_path, [*lines, {"prompt": "four"}], "--sample")
    assert code == 2 and "with another schema" in said
    schema.write_text('{"type": "objec"}')
    code, said, _ = run(folder, tmp_path, lines, "--json-schema", str(schema))
    assert code == 2 and "holds no schema" in said
