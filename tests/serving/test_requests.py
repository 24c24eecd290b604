"""Bodies as clients send them: values that ask for nothing are accepted, and those that ask for something refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from transformers import GenerationConfig

from forebay.runtime.run.sampling import Sampling
from forebay.serving.refusal import Refusal
from forebay.serving.requests import COMPLETION_TOKENS, NEUTRAL, PLAIN, Inquiry, default_sampling, read_inquiry

HI = {"role": "user", "content": "hi"}


def read(chat: bool = True, strict: bool = True, **fields: Any) -> Inquiry:
    text: dict[str, Any] = {"messages": [HI]} if chat else {"prompt": "hi"}
    return read_inquiry(json.dumps(text | fields).encode(), "tiny", chat=chat, strict=strict)


@pytest.mark.parametrize("fields", [
    {"max_tokens": -1}, {"max_completion_tokens": -1}, {"stop": ""}, {"stop": []}, {"stop": ["", ""]}, {"top_k": 0},
    {"top_k": -1}, {"top_k": 0.0}, {"min_p": 0.0}, {"repetition_penalty": 1.0}, {"repetition_penalty": 1},
    {"chat_template_kwargs": {}}, {"model": ""}, {"stream_options": {}}, {"n": 1}, {"logit_bias": {}},
    {"logprobs": False}, {"top_logprobs": 0}, {"parallel_tool_calls": False}, {name: None for name in NEUTRAL},
    *({name: value} for name, values in NEUTRAL.items() for value in values),
])
def test_values_that_ask_for_nothing_change_nothing(fields: dict[str, Any]) -> None:
    assert read(**fields) == read()


BAD = [
    {"max_tokens": 0}, {"max_tokens": -2}, {"max_tokens": -1.0}, {"max_tokens": -1, "max_completion_tokens": -5},
    {"max_completion_tokens": 4, "max_tokens": "x"}, {"stop": ["", "x" * 257]}, {"stop": 5}, {"stop": ["a"] * 17},
    {"top_k": 40.5}, {"top_k": False}, {"min_p": 1.5}, {"repetition_penalty": True}, {"repetition_penalty": 0},
    {"chat_template_kwargs": []}, {"reasoning_effort": 3}, {"enable_thinking": 1}, {"logprobs": 0}, {"n": 1.5},
    {"n": 0}, {"n": 999}, {"top_logprobs": 21}, {"logit_bias": {"x": 1}}, {"logit_bias": {"3": 101}},
    {"logit_bias": {"3": True}}, {"logit_bias": [3]}, {"frequency_penalty": 2.1}, {"presence_penalty": False},
    {"seed": 1 << 70}, {"stream": 1},
    {"temperature": 3}, {"temperature": "1"}, {"top_p": -0.1}]
UNSERVED = [{"ignore_eos": True}, {"web_search_options": {}}, {"mirostat": 2}, {"wish": 1}, {"echo": 0}]


@pytest.mark.parametrize("fields", [*BAD, *UNSERVED])
def test_what_cannot_be_served_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(Refusal) as refused:
        read(**fields)
    assert refused.value.status == 400 and refused.value.field in fields and refused.value.field in str(refused.value)


@pytest.mark.parametrize("fields", BAD)
def test_values_of_no_sense_are_refused_without_strict(fields: dict[str, Any]) -> None:
    with pytest.raises(Refusal):
        read(strict=False, **fields)


@pytest.mark.parametrize("fields", UNSERVED)
def test_what_is_not_served_is_passed_over_and_said(fields: dict[str, Any]) -> None:
    found = read(strict=False, **fields)
    assert [next(iter(fields)) in warning for warning in found.warnings] == [True]
    assert replace(found, warnings=()) == read()


def test_fields_of_sampling_and_answers() -> None:
    found = read(frequency_penalty=0.5, presence_penalty=-1, repeat_penalty=1.2, min_p=0.1, logit_bias={"7": -100},
                 n=3, logprobs=True, top_logprobs=2, reasoning_effort="low", chat_template_kwargs={"a": 1})
    assert found.sampling == Sampling(True, 1.0, 0, 1.0, 0.1, 1.2, 0.5, -1.0, ((7, -100.0),))
    assert (found.choices, found.top_logprobs) == (3, 2) and found.template == {"reasoning_effort": "low", "a": 1}
    assert read(reasoning_effort="none").template == {"enable_thinking": False}
    assert read(temperature=0, repetition_penalty=1.3).sampling == Sampling(repetition_penalty=1.3)
    assert read(logprobs=True).top_logprobs == read(False, logprobs=0).top_logprobs == 0
    assert read(False, prompt=["a", [1, 2]]).prompts == ("a", (1, 2))
    assert read(False, prompt=[1, 2]).prompts == ((1, 2),)


def test_no_limit_is_what_the_server_gives() -> None:
    assert read(False).new_tokens == read(False, max_tokens=None).new_tokens == COMPLETION_TOKENS
    assert read(False, max_tokens=-1).new_tokens is None
    assert read(False, max_completion_tokens=-1, max_tokens=3).new_tokens is None
    assert read(False, max_completion_tokens=3, max_tokens=-1).new_tokens == 3


@pytest.mark.parametrize("said", [
    {"content": None, "tool_calls": []}, {"content": None}, {}, {"content": []}, {"content": "", "refusal": None},
    {"content": None, "reasoning_content": "", "annotations": [], "audio": None, "function_call": None,
     "provider_specific_fields": {"refusal": None}},
])
def test_an_answer_without_text_is_an_empty_message(said: dict[str, Any]) -> None:
    found = read(messages=[HI, {"role": "assistant", **said}, HI]).messages
    assert found == (HI, {"role": "assistant", "content": ""}, HI)


@pytest.mark.parametrize(("message", "field"), [
    ({"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}, "tool_calls"),
    ({"role": "assistant", "content": None, "tool_calls": 5}, "tool_calls"),
    ({"role": "assistant", "content": "no", "x": {"a": {"b": 1}}}, "x"), ({"role": "user", "content": None}, "content"),
    ({"role": "user"}, "content"), ({"role": "assistant", "content": {}}, "content"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "content"),
    ({"role": "tool", "content": "3", "tool_call_id": 5}, "tool_call_id"),
])
def test_parts_of_a_message_that_would_be_left_out_are_refused(message: dict[str, Any], field: str) -> None:
    with pytest.raises(Refusal, match=rf"{field} of messages\[0\]") as refused:
        read(messages=[message, HI])
    assert refused.value.status == 400


def test_calls_and_results_reach_the_template() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    said = [{"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": [{"type": "text", "text": "3"}], "tool_call_id": "c"}]
    assert read(messages=said).messages == (
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "3", "tool_call_id": "c"})


@pytest.mark.parametrize(("config", "sampling"), [
    ({}, PLAIN), ({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True}, Sampling(True, 0.6, 20, 0.95)),
    ({"eos_token_id": 3, "top_p": 0.8}, Sampling(True, 1.0, 0, 0.8)),
    ({"min_p": 0.05, "repetition_penalty": 1.3}, Sampling(True, 1.0, 0, 1.0, 0.05, 1.3))])
def test_requests_that_do_not_say_draw_as_the_model_recommends(config: dict[str, Any], sampling: Sampling) -> None:
    assert default_sampling(GenerationConfig(**config).to_diff_dict()) == sampling
    body = json.dumps({"prompt": "w1"}).encode()
    assert read_inquiry(body, "tiny", chat=False, sampling=sampling).sampling == sampling
    said = json.dumps({"prompt": "w1", "temperature": 0.3, "top_p": 0.5}).encode()
    found = read_inquiry(said, "tiny", chat=False, sampling=sampling).sampling
    assert found == replace(sampling, temperature=0.3, top_p=0.5)
    whole = json.dumps({"prompt": "w1", "top_k": -1, "temperature": 1}).encode()
    assert read_inquiry(whole, "tiny", chat=False, sampling=sampling).sampling.top_k == 0
    greedy = json.dumps({"prompt": "w1", "temperature": 0}).encode()
    assert read_inquiry(greedy, "tiny", chat=False, sampling=sampling).sampling == Sampling(
        repetition_penalty=sampling.repetition_penalty)
