"""The answers to one request, as they come and as they are at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from forebay.runtime.run.logits_processing import TokenLogprobs
from forebay.serving.refusal import Refusal


@dataclass(frozen=True)
class ToolCall:
    """A function that the model calls; `arguments` are JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Delta:
    """A new part of an answer: more of its text or of the reasoning before it, or a call."""

    content: str = ""
    reasoning: str = ""
    call: ToolCall | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


def merged(deltas: Sequence[Delta]) -> list[Delta]:
    """Deltas; log probabilities go with the text that follows them."""
    if len(deltas) > 1 and deltas[0].logprobs and not deltas[0].content:
        return [replace(deltas[1], logprobs=deltas[0].logprobs), *deltas[2:]]
    return list(deltas)


@dataclass
class AnswerChoice:
    """One answer so far."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None
    stop: str | None = None  # the string that ended it
    tokens: int = 0

    def add(self, delta: Delta) -> None:
        self.content += delta.content
        self.reasoning += delta.reasoning
        self.logprobs += delta.logprobs
        if delta.call is not None:
            self.calls.append(delta.call)


@dataclass(frozen=True)
class Usage:
    """Tokens of a request's prompts, of which `cached` were known before, and of all its answers."""

    prompt: int
    completion: int
    cached: int = 0


class Reply(Protocol):
    """The form in which a client reads the answers to its request: whole, or as server-sent events."""

    def begin(self, prompt_tokens: int) -> Iterator[bytes]:
        """Return the events before all answers."""
        ...

    def more(self, index: int, delta: Delta) -> Iterator[bytes]:
        """More of the answer with this index."""
        ...

    def ended(self, index: int, choice: AnswerChoice) -> Iterator[bytes]:
        """The answer with this index is complete."""
        ...

    def end(self, usage: Usage) -> Iterator[bytes]:
        """All answers are complete."""
        ...

    def failed(self, refusal: Refusal) -> Iterator[bytes]:
        """No more comes, and why."""
        ...

    def whole(self, choices: Sequence[AnswerChoice], usage: Usage) -> dict[str, Any]:
        """All answers at once."""
        ...
