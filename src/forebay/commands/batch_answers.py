"""Answers to lines of OpenAI's batch files, as its API responds."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from forebay.commands.batch_requests import COMPLETIONS, RESPONSES, BatchRequest
from forebay.runtime.run.logits_processing import Constraint, TokenLogprobs
from forebay.runtime.run.request import Request
from forebay.runtime.run.sampling import Sampling
from forebay.serving.answer_text import AnswerText
from forebay.serving.choices import AnswerChoice, Delta, Reply, Usage
from forebay.serving.dialects.openai_responses import ResponseReply
from forebay.serving.openai_replies import ChatReply, CompletionReply
from forebay.serving.text_codec import AnswerParts, TextCodec


@dataclass
class BatchAnswer:
    """The answers to one line as they end.

    Attributes:
        custom_id: Of the line.
        request: Of the line.
        prompt: Token ids.
        new_tokens: Of each answer at most.
        sampling: Of the job, for what the body does not say.
        codec: The model's texts.
        eos: Tokens that end answers.
    """

    custom_id: str
    request: BatchRequest
    prompt: Sequence[int]
    new_tokens: int
    sampling: Sampling
    codec: TextCodec
    eos: frozenset[int]
    ended: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.inquiry = self.request.inquiry(self.sampling)

    @cached_property
    def parts(self) -> AnswerParts:
        """Made late: a job has thousands of lines."""
        return self.codec.parts(self.inquiry, list(self.prompt), self.inquiry.choices)

    def requests(self, draws: Callable[[int], torch.Generator]) -> list[Request]:
        """Return the request of each answer. It draws from `draws` of its number unless the body has a seed."""
        asked, seed = [], self.inquiry.seed
        for number in range(self.inquiry.choices):
            constraint = None if self.inquiry.grammar is None else partial(self._constraint, number)
            make = partial(draws, number) if seed is None else partial(_seeded, seed + number)
            told = None if self.inquiry.top_logprobs is None else self.logprobs.setdefault(number, []).append
            asked.append(Request(torch.tensor(self.prompt), self.new_tokens, make, self.inquiry.sampling, constraint,
                                 self.inquiry.top_logprobs or 0, told))
        return asked

    def _constraint(self, number: int) -> Constraint:
        make = self.parts.constraints[number]
        assert make is not None
        return make()

    def end(self, number: int, ids: list[int]) -> bool:
        """Take one answer; whether it is the last."""
        self.ended[number] = ids
        return len(self.ended) == self.inquiry.choices

    def line(self, model: str) -> dict[str, Any]:
        """The line of the output file, as OpenAI has it."""
        choices = [self._choice(number) for number in range(self.inquiry.choices)]
        usage = Usage(len(self.prompt), sum(choice.tokens for choice in choices))
        form = CompletionReply if self.request.url == COMPLETIONS else ChatReply
        reply: Reply = ResponseReply(model, self.request.body) if self.request.url == RESPONSES else form(
            model, False, self.inquiry.top_logprobs, self.codec.decode)
        return {"id": "batch_req_" + secrets.token_hex(12), "custom_id": self.custom_id, "response": {
            "status_code": 200, "request_id": self.request.digest, "body": reply.whole(choices, usage)}, "error": None}

    def _choice(self, number: int) -> AnswerChoice:
        text = AnswerText(self.parts.decode, self.inquiry.stops, self.eos)
        for token in self.ended[number]:
            if not text.add(token):
                break
        choice, parser = AnswerChoice(tokens=len(text.ids)), self.parts.parsers[number]
        choice.add(Delta(logprobs=tuple(self.logprobs.get(number, ())[: len(text.ids)])))
        for delta in (*parser.feed(text.text), *parser.end()):
            choice.add(delta)
        choice.finish = ("tool_calls" if choice.calls else "stop") if text.stopped else "length"
        return choice


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed & (1 << 63) - 1)
