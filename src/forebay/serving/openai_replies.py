"""Answers as OpenAI's completions and chat completions have them: whole, and as the chunks of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from forebay.runtime.run.logits_processing import TokenLogprobs
from forebay.serving.choices import AnswerChoice, Delta, ToolCall, Usage
from forebay.serving.refusal import Refusal

DONE = b"data: [DONE]\n\n"


def event(value: dict[str, Any], name: str | None = None) -> bytes:
    """A server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


class CompletionReply:
    """Answers of completions. `told` are the most likely tokens that go with each (None: no log probabilities)."""

    kind, prefix, chunk_kind = "text_completion", "cmpl-", "text_completion"

    def __init__(self, model: str, with_usage: bool, told: int | None, decode: Callable[..., str]) -> None:
        self.heading = {"id": self.prefix + secrets.token_hex(12), "object": self.kind, "created": int(time.time()),
                        "model": model}
        self.with_usage, self.told, self.decode = with_usage, told, decode

    def begin(self, prompt_tokens: int) -> Iterator[bytes]:
        yield from ()

    def more(self, index: int, delta: Delta) -> Iterator[bytes]:
        yield self._chunk(index, delta)

    def ended(self, index: int, choice: AnswerChoice) -> Iterator[bytes]:
        yield self._chunk(index, Delta(), choice.finish)

    def end(self, usage: Usage) -> Iterator[bytes]:
        if self.with_usage:
            yield event({**self.heading, "object": self.chunk_kind, "choices": [], "usage": usage_of(usage)})
        yield DONE

    def failed(self, refusal: Refusal) -> Iterator[bytes]:
        yield event(refusal.body())
        yield DONE

    def whole(self, choices: Sequence[AnswerChoice], usage: Usage) -> dict[str, Any]:
        told = [{"index": i, **self._said(choice), "logprobs": self._logprobs(choice.logprobs),
                 "finish_reason": choice.finish} for i, choice in enumerate(choices)]
        return {**self.heading, "choices": told, "usage": usage_of(usage)}

    def _chunk(self, index: int, delta: Delta, finish: str | None = None) -> bytes:
        choice = {"index": index, **self._added(index, delta), "logprobs": self._logprobs(delta.logprobs),
                  "finish_reason": finish}
        return event({**self.heading, "object": self.chunk_kind, "choices": [choice]})

    def _said(self, choice: AnswerChoice) -> dict[str, Any]:
        return {"text": choice.content}

    def _added(self, index: int, delta: Delta) -> dict[str, Any]:
        return {"text": delta.content}

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if self.told is None or not logprobs:
            return None
        texts = [self.decode([each.token], True) for each in logprobs]
        offsets = [sum(map(len, texts[:i])) for i in range(len(texts))]
        top = [{self.decode([token], True): value for token, value in each.top} for each in logprobs]
        return {"tokens": texts, "token_logprobs": [each.logprob for each in logprobs],
                "top_logprobs": top if self.told else None, "text_offset": offsets}


class ChatReply(CompletionReply):
    """Answers of chats."""

    kind, prefix, chunk_kind = "chat.completion", "chatcmpl-", "chat.completion.chunk"

    def __init__(self, model: str, with_usage: bool, told: int | None, decode: Callable[..., str]) -> None:
        super().__init__(model, with_usage, told, decode)
        self._begun: set[int] = set()
        self._calls: dict[int, int] = {}

    def _said(self, choice: AnswerChoice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls:
            message |= {"content": choice.content or None, "tool_calls": [_call(call) for call in choice.calls]}
        return {"message": message}

    def _added(self, index: int, delta: Delta) -> dict[str, Any]:
        added: dict[str, Any] = {}
        if index not in self._begun:
            self._begun.add(index)
            added = {"role": "assistant", "content": ""}
        if delta.content:
            added["content"] = delta.content
        if delta.reasoning:
            added["reasoning_content"] = delta.reasoning
        if delta.call is not None:
            number = self._calls[index] = self._calls.get(index, -1) + 1
            added["tool_calls"] = [{"index": number, **_call(delta.call)}]
        return {"delta": added}

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if self.told is None or not logprobs:
            return None
        return {"content": [{**self._token(each.token, each.logprob),
                             "top_logprobs": [self._token(*pair) for pair in each.top]} for each in logprobs],
                "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.decode([token], True)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def usage_of(usage: Usage) -> dict[str, Any]:
    """Numbers of tokens, as OpenAI's API has them."""
    return {"prompt_tokens": usage.prompt, "completion_tokens": usage.completion,
            "total_tokens": usage.prompt + usage.completion, "prompt_tokens_details": {"cached_tokens": usage.cached}}
