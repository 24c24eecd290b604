"""Other clients as they are: their own calls for chats, streams, tools and structured output. Each is skipped where it
is not installed; `pip install '.[clients]'` installs all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from serving.served import Running, serving_bytes
from serving.test_tools import ASK, NEW, PROMPT, TEMPLATE, TOOLS

pytest.importorskip("llguidance")
pydantic = pytest.importorskip("pydantic")


class Answer(pydantic.BaseModel):  # type: ignore[misc,name-defined]
    """What structured output asks for, closed so that a random model ends."""

    model_config = pydantic.ConfigDict(extra="forbid")
    yes: bool


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving_bytes(tmp_path_factory.mktemp("bytes"), TEMPLATE, PROMPT, NEW) as running:
        yield running


def told(server: Running, **fields: Any) -> str:
    """The server's own answer to the chat that clients ask."""
    body = json.dumps({"model": "tiny", "messages": ASK, "temperature": 0, "max_tokens": 12} | fields).encode()
    status, reply = server.send("POST", "/v1/chat/completions", body)
    assert status == 200, reply
    text = json.loads(reply)["choices"][0]["message"]["content"]
    assert isinstance(text, str) and text
    return text


def test_anthropic(server: Running) -> None:
    client = pytest.importorskip("anthropic").Anthropic(base_url=server.url, api_key="none", max_retries=0)
    asked: dict[str, Any] = dict(model="tiny", max_tokens=12, messages=ASK, extra_body={"temperature": 0})
    assert client.messages.create(**asked).content[0].text == told(server)
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == told(server)
    parameters = TOOLS[0]["function"]["parameters"]
    found = client.messages.create(model="tiny", max_tokens=NEW, messages=ASK, tool_choice={"type": "any"}, tools=[
        {"name": "add", "description": "adds", "input_schema": parameters}])
    (call,) = (block for block in found.content if block.type == "tool_use")
    assert found.stop_reason == "tool_use" and call.name == "add" and set(call.input) == {"a"}


def test_langchain(server: Running) -> None:
    made = pytest.importorskip("langchain_openai").ChatOpenAI
    asked: dict[str, Any] = dict(model="tiny", base_url=f"{server.url}/v1", api_key="none", temperature=0)
    chat = made(max_tokens=12, **asked)
    assert chat.invoke("hi").content == told(server)
    assert "".join(piece.content for piece in chat.stream("hi")) == told(server)
    assert isinstance(made(max_tokens=NEW, **asked).with_structured_output(Answer).invoke("hi"), Answer)
    called = made(max_tokens=NEW, **asked).bind_tools(TOOLS, tool_choice="look").invoke("hi")
    assert called.tool_calls[0]["name"] == "look" and set(called.tool_calls[0]["args"]) == {"a"}


def test_llama_index(server: Running) -> None:
    made = pytest.importorskip("llama_index.llms.openai_like").OpenAILike
    llm = made(model="tiny", api_base=f"{server.url}/v1", api_key="none", is_chat_model=True, temperature=0,
               max_tokens=12)
    message = pytest.importorskip("llama_index.core.llms").ChatMessage(role="user", content="hi")
    assert llm.chat([message]).message.content == told(server)
    assert "".join(piece.delta or "" for piece in llm.stream_chat([message])) == told(server)


def test_litellm(server: Running) -> None:
    litellm = pytest.importorskip("litellm")
    asked: dict[str, Any] = dict(model="openai/tiny", api_base=f"{server.url}/v1", api_key="none", messages=ASK,
                                 temperature=0, max_tokens=12)
    assert litellm.completion(**asked).choices[0].message.content == told(server)
    pieces = litellm.completion(**asked, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == told(server)


def test_instructor(server: Running) -> None:
    instructor, openai = pytest.importorskip("instructor"), pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        found = instructor.from_openai(client, mode=mode).chat.completions.create(
            model="tiny", messages=ASK, response_model=Answer, max_tokens=NEW, max_retries=0)
        assert isinstance(found, Answer)


def test_an_agent_goes_on_until_it_has_called_each_tool(server: Running) -> None:
    """The loop of agents: calls are carried out, results go back, and the last turn answers in text."""
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages: list[Any] = [*ASK]
    for name in ("look", "add"):
        choice: Any = {"type": "function", "function": {"name": name}}
        turn = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, tool_choice=choice,
                                              temperature=0).choices[0]
        assert turn.finish_reason == "tool_calls"
        (call,) = turn.message.tool_calls
        assert call.function.name == name
        messages += [turn.message, {"role": "tool", "tool_call_id": call.id,
                                    "content": json.loads(call.function.arguments)["a"]}]
    last = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, tool_choice="none",
                                          max_tokens=12, temperature=0).choices[0]
    assert last.message.content and not last.message.tool_calls
