"""Parts of answers in the forms in which models write them, however their text is cut into pieces."""

from __future__ import annotations

import json
import random

import pytest

from forebay.serving.answer_parser import CONTENT, REASONING, AnswerFormat, answer_format
from forebay.serving.choices import AnswerChoice

QWEN = "{{ tools }}<tool_call><think></think>"
PLAIN_HERMES = "{{ tools }}<tool_call>"
LLAMA = "{{ tools }}<|python_tag|>"
MISTRAL = "{{ tools }}[TOOL_CALLS]"
MAGISTRAL = "{{ tools }}[TOOL_CALLS][THINK]"
HARMONY = "<|start|>assistant<|channel|>analysis"

Calls = list[tuple[str, dict]]
CASES: list[tuple[str, str, str, str, Calls]] = [  # template, answer, reasoning, content, calls
    (QWEN, "Hello <b>world</b>.\n\n x < y ", "", "Hello <b>world</b>.\n\n x < y ", []),
    (QWEN, "<think>\nhm\n\nwell\n</think>\n\nyes", "hm\n\nwell", "yes", []),
    (QWEN, '<think>\n\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "", "",
     [("add", {"a": 1})]),
    (QWEN, 'I call.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n'
     '{"name": "g", "arguments": {"s": "</t>"}}\n</tool_call>\n', "", "I call.", [("f", {}), ("g", {"s": "</t>"})]),
    (QWEN, '<tool_call>{"name": "f", "arguments": {"x": [1, {"y": "é"}]}}', "", "", [("f", {"x": [1, {"y": "é"}]})]),
    (QWEN, "<tool_call>\nno JSON\n</tool_call> after", "", "\nno JSON\nafter", []),
    (PLAIN_HERMES, "<tool_call>\n<function=run>\n<parameter=cmd>\nls -l\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
     "</function>\n</tool_call>", "", "", [("run", {"cmd": "ls -l", "n": 3})]),
    (LLAMA, '{"name": "add", "parameters": {"a": 1}}', "", "", [("add", {"a": 1})]),
    (LLAMA, '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": 2}}', "", "",
     [("f", {}), ("g", {"b": 2})]),
    (LLAMA, "It is {braces} text", "", "It is {braces} text", []),
    (LLAMA, '{"answer": 3} ', "", '{"answer": 3} ', []),
    (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', "", "",
     [("f", {"a": 1}), ("g", {})]),
    (MISTRAL, 'So:[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abc123def[ARGS]{"b": {}}', "", "So:",
     [("f", {"a": 1}), ("g", {"b": {}})]),
    (MAGISTRAL, "[THINK]hm[/THINK]yes [x]", "hm", "yes [x]", []),
    (HARMONY, "<|channel|>analysis<|message|>hm hm<|end|><|start|>assistant<|channel|>final<|message|>yes", "hm hm",
     "yes", []),
    (HARMONY, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.add "
     '<|constrain|>json<|message|>{"a": 1}<|call|>', "hm", "", [("add", {"a": 1})]),
    (HARMONY, "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.f<|channel|>commentary"
     "<|message|>{}", "", "I look.", [("f", {})]),
]


def read(format: AnswerFormat, pieces: list[str], begins: int = CONTENT) -> tuple[str, str, Calls]:
    parser, choice = format.parser(begins), AnswerChoice()
    for deltas in (*map(parser.feed, pieces), parser.end()):
        for delta in deltas:
            assert delta.content or delta.reasoning or delta.call
            choice.add(delta)
    assert len({call.id for call in choice.calls}) == len(choice.calls)
    assert all(len(call.id) == 9 and call.id.isalnum() for call in choice.calls)
    return choice.reasoning, choice.content, [(call.name, json.loads(call.arguments)) for call in choice.calls]


@pytest.mark.parametrize(("template", "answer", "reasoning", "content", "calls"), CASES)
def test_parts_are_told_apart_however_text_comes(
    template: str, answer: str, reasoning: str, content: str, calls: Calls
) -> None:
    format, draw = answer_format(template), random.Random(answer)
    for most in (1, 2, 3, 7, 30, len(answer)):
        pieces, at = [], 0
        while at < len(answer):
            size = draw.randint(1, most)
            pieces.append(answer[at : at + size])
            at += size
        assert read(format, pieces) == (reasoning, content, calls)


def test_an_answer_may_begin_within_reasoning() -> None:
    assert read(answer_format(QWEN), ["hm\n", "</thi", "nk>\n\nyes"], REASONING) == ("hm", "yes", [])


def test_without_tools_no_call_is_looked_for() -> None:
    said = '<think>a</think><tool_call>{"name": "f"}</tool_call>'
    assert read(answer_format(QWEN).without_calls(), [said]) == ("a", said.removeprefix("<think>a</think>"), [])
    assert read(answer_format(LLAMA).without_calls(), ['{"name": "f"}']) == ("", '{"name": "f"}', [])


def test_templates_without_marks_write_calls_as_hermes() -> None:
    answer = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for template in (None, "{{ messages }}"):
        assert read(answer_format(template), [answer]) == ("", "", [("f", {})])
