"""The parts of an answer's text: reasoning, content and calls of tools, by the marks that models write around them."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from forebay.serving.answer_text import overlap
from forebay.serving.choices import Delta, ToolCall
from forebay.serving.tool_calls import Calls, parse_bare, parse_hermes, parse_mistral

CONTENT, REASONING, CALL, HEADER, SKIPPED = range(5)  # what a part of an answer is
HARMONY_TOOL = re.compile(r"to=(?:functions\.)?([\w.-]+)")
BARE_CALL = "{"  # begins an answer that is a call


class AnswerParser(Protocol):
    """Text of one answer, as it comes."""

    def feed(self, text: str) -> list[Delta]:
        """Parse the next piece of text."""
        ...

    def end(self) -> list[Delta]:
        """Return the rest when no more text comes."""
        ...


class WholeText:
    """All is content."""

    def feed(self, text: str) -> list[Delta]:
        return [Delta(text)]

    def end(self) -> list[Delta]:
        return []


@dataclass(frozen=True)
class AnswerFormat:
    """How a model marks the parts of its answers.

    Attributes:
        marks: By mark what comes after it.
        parse: Calls in the text between marks of a call; None where there are none.
        special: Whether some marks are special tokens, which decoding would leave out.
        bare_calls: Whether an answer that begins with a brace is a call.
        opens_reasoning: The mark at a prompt's end after which an answer begins with reasoning.
    """

    marks: Mapping[str, int]
    parse: Callable[[str], Calls | None]
    special: bool = False
    bare_calls: bool = False
    opens_reasoning: str | None = None

    def without_calls(self) -> AnswerFormat:
        """The format of answers for which there are no tools."""
        return self.with_marks({mark: part for mark, part in self.marks.items() if mark not in CALL_MARKS}, False)

    def with_marks(self, marks: Mapping[str, int], bare_calls: bool = True) -> AnswerFormat:
        """The format with other marks."""
        return replace(self, marks=marks, bare_calls=self.bare_calls and bare_calls)

    def parser(self, begins: int = CONTENT) -> AnswerParser:
        """A parser of one answer, which begins as this part."""
        return MarkedParser(self, begins) if self.marks or self.bare_calls else WholeText()


THINK = {"<think>": REASONING, "</think>": CONTENT}
MISTRAL_THINK = {"[THINK]": REASONING, "[/THINK]": CONTENT}
HARMONY = {"<|channel|>": HEADER, "<|message|>": CONTENT, "<|end|>": SKIPPED, "<|call|>": SKIPPED,
           "<|return|>": SKIPPED, "<|start|>": HEADER}
HERMES_CALL = {"<tool_call>": CALL, "</tool_call>": CONTENT}
CALL_MARKS = {*HERMES_CALL, "[TOOL_CALLS]", "<|python_tag|>"}


def answer_format(template: str | None) -> AnswerFormat:
    """The format of the answers of a model with this chat template, by the marks that the template has."""
    template = template or ""
    if "<|channel|>" in template:
        return AnswerFormat(HARMONY, parse_bare, special=True)
    if "[TOOL_CALLS]" in template:
        thinks = "[THINK]" in template
        return AnswerFormat({"[TOOL_CALLS]": CALL, **(MISTRAL_THINK if thinks else {})}, parse_mistral, special=True,
                            opens_reasoning="[THINK]" if thinks else None)
    think = THINK if "</think>" in template else {}
    opens = "<think>" if think else None
    if "<tool_call>" not in template and ("<|python_tag|>" in template or '"parameters": dictionary' in template):
        return AnswerFormat({"<|python_tag|>": CALL, **think}, parse_bare, special=True, bare_calls=True,
                            opens_reasoning=opens)
    return AnswerFormat({**HERMES_CALL, **think}, parse_hermes, opens_reasoning=opens)


BARE = AnswerFormat({}, parse_bare, bare_calls=True)  # of answers that must be a call


class MarkedParser:
    """Tells the parts of an answer apart by the marks of its format. A mark that is not complete is held back, and so
    is white space until it is known that text follows."""

    def __init__(self, format: AnswerFormat, begins: int) -> None:
        self.format, self.part = format, begins
        self.text = self.header = ""
        self.call = ""  # text of a call so far
        self.tool: str | None = None  # that a header names
        self.begun = self.marked = False  # whether there is text of this part, and whether there was a mark

    def feed(self, text: str) -> list[Delta]:
        self.text += text
        deltas: list[Delta] = []
        while True:
            marks = [(at, mark) for mark in self.format.marks if (at := self.text.find(mark)) >= 0]
            if not marks:
                break
            at, mark = min(marks)
            deltas += self._told(self.text[:at], ends=True)
            self.text = self.text[at + len(mark) :]
            deltas += self._enter(self.format.marks[mark])
            self.marked = True
        held = max((overlap(self.text, mark) for mark in self.format.marks), default=0)
        end = len(self.text) - held
        if self.part in (CONTENT, REASONING):
            end = len(self.text[:end].rstrip()) or 0
        known, self.text = self.text[:end], self.text[end:]
        return deltas + self._told(known)

    def end(self) -> list[Delta]:
        deltas = self._told(self.text, ends=self.part == REASONING, last=True)
        self.text = ""
        return deltas + self._close_call()

    def _enter(self, part: int) -> list[Delta]:
        """Another part begins."""
        deltas = self._close_call()
        if part == CONTENT and self.part == HEADER:
            named = HARMONY_TOOL.search(self.header)
            self.tool = named[1] if named else None
            part = CALL if named else REASONING if "analysis" in self.header else CONTENT
        self.header = f"{self.header} " if part == self.part == HEADER else ""
        self.part = part
        return deltas

    def _told(self, text: str, ends: bool = False, last: bool = False) -> list[Delta]:
        """The parts in more text of the present part, which `ends` with it; white space around parts is left out."""
        if self.part == CONTENT and self.format.bare_calls and not self.begun and text.lstrip().startswith(BARE_CALL):
            self.part = CALL
        if self.part == CALL:
            self.call += text
        elif self.part == HEADER:
            self.header += text
        elif self.part in (CONTENT, REASONING):
            text = text if self.begun or (last and not self.marked) else text.lstrip()
            text = text.rstrip() if ends else text
            if text:
                self.begun = True
                return [Delta(text)] if self.part == CONTENT else [Delta(reasoning=text)]
        return []

    def _close_call(self) -> list[Delta]:
        """The calls in the text of a call that has ended, or that text where it is none."""
        text, self.call, was = self.call, "", self.part
        if was in (REASONING, CALL):
            self.begun = False  # white space after these is no content
        if not text.strip():
            return []
        parsed = [(self.tool, text.strip())] if self.tool else self.format.parse(text)
        self.tool = None
        if parsed is None:
            return [Delta(text)]
        return [Delta(call=ToolCall(call_id(), name, arguments)) for name, arguments in parsed]


def call_id() -> str:
    """A new call's id: nine letters and digits, as templates of Mistral want them."""
    return secrets.token_hex(5)[:9]
