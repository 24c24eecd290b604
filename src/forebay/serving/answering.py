"""One request between its client and the batcher: its answers as they come, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from forebay.runtime.run.logits_processing import Constraint
from forebay.runtime.run.step_inputs import PromptFeatures
from forebay.serving.answer_parser import AnswerParser
from forebay.serving.answer_text import AnswerText
from forebay.serving.batcher import Batcher, Heard, Pending
from forebay.serving.choices import AnswerChoice, Delta, Reply, Usage, merged
from forebay.serving.refusal import Refusal
from forebay.serving.requests import Inquiry

CLIENT_LEFT = 499  # nobody sees it but the metrics


@dataclass(frozen=True)
class PromptTokens:
    """A prompt as token ids, the most tokens of an answer to it, and what stands for tokens of its images."""

    ids: list[int]
    new_tokens: int
    features: PromptFeatures | None = None


class Answering:
    """The answers to one request, in the order in which their parts come."""

    def __init__(
        self, batcher: Batcher, inquiry: Inquiry, prompts: Sequence[PromptTokens], decode: Callable[[list[int]], str],
        parsers: Sequence[AnswerParser], constraints: Sequence[Callable[[], Constraint] | None],
    ) -> None:
        self.batcher, self.inquiry = batcher, inquiry
        self.prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        self.heard: asyncio.Queue[tuple[int, Heard]] = asyncio.Queue()
        self.loop = asyncio.get_running_loop()
        seed = inquiry.seed if inquiry.seed is not None else secrets.randbits(62)
        self.pending = [
            Pending(prompt.ids, prompt.new_tokens, inquiry.sampling, seed + number,
                    AnswerText(decode, inquiry.stops, batcher.eos), self._hears(at * inquiry.choices + number),
                    constraints[at * inquiry.choices + number], inquiry.top_logprobs, inquiry.adapter,
                    prompt.features, inquiry.priority)
            for at, prompt in enumerate(prompts) for number in range(inquiry.choices)]
        self.choices, self.parsers = [AnswerChoice() for _ in self.pending], parsers

    def _hears(self, index: int) -> Callable[[Heard], None]:
        def hear(what: Heard) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to hear
                self.loop.call_soon_threadsafe(self.heard.put_nowait, (index, what))

        return hear

    def submit(self) -> None:
        """Let all answers wait for slots; Refusal if one may not, and then none does."""
        try:
            for pending in self.pending:
                self.batcher.submit(pending)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Nobody hears the answers any more."""
        for pending in self.pending:
            self.batcher.leave(pending)

    @property
    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, sum(choice.tokens for choice in self.choices),
                     sum(first.cached for first in self.pending[:: self.inquiry.choices]))

    async def deltas(self) -> AsyncIterator[tuple[int, Delta | None]]:
        """Yield new text with the index of its answer; None at its end. Refusal where the model fails."""
        open_ = len(self.choices)
        while open_:
            index, what = await self.heard.get()
            if what.refusal is not None:
                raise what.refusal
            choice, parser = self.choices[index], self.parsers[index]
            deltas = [Delta(logprobs=what.logprobs)] if what.logprobs else []
            deltas += parser.feed(what.text) if what.text else []
            deltas += parser.end() if what.finish is not None else []
            for delta in merged(deltas):
                choice.add(delta)
                yield index, delta
            if what.finish is not None:
                choice.tokens, choice.stop = what.tokens, self.pending[index].answer.stop
                choice.finish = "tool_calls" if choice.calls and what.finish == "stop" else what.finish
                open_ -= 1
                yield index, None

    async def respond(self, receive: Receive, reply: Reply, send_s: float) -> Response:
        """The response in the form of `reply`; a client must take each part within `send_s`.

        Raises:
            Refusal: The answers may not wait, or the model fails before there is a response.
        """
        deltas = self.deltas()
        try:
            self.submit()
            if self.inquiry.stream:
                first = await unless_gone(receive, anext(deltas))
                if first is not None:
                    return EventStream(self, first, deltas, reply, send_s)
            elif await unless_gone(receive, _exhausted(deltas)) is not None:
                return JSONResponse(reply.whole(self.choices, self.usage))
        except BaseException:
            self.leave()
            raise
        self.leave()
        return Response(status_code=CLIENT_LEFT)


class EventStream(Response):
    """Sends events as they come; a client that leaves, or takes nothing for too long, is heard no more."""

    media_type = "text/event-stream"

    def __init__(
        self, answering: Answering, first: tuple[int, Delta | None], deltas: AsyncIterator[tuple[int, Delta | None]],
        reply: Reply, send_s: float,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.answering, self.first, self.deltas, self.reply = answering, first, deltas, reply
        self.send_s = send_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(TimeoutError):  # an answer without its end, whose connection is closed
                await unless_gone(receive, self._send_all(send))
        finally:
            self.answering.leave()

    async def _send_all(self, send: Send) -> None:
        async def within(message: dict[str, Any]) -> None:
            async with asyncio.timeout(self.send_s):
                await send(message)

        await within({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events():
            await within({"type": "http.response.body", "body": event, "more_body": True})
        await within({"type": "http.response.body", "body": b""})

    async def _events(self) -> AsyncIterator[bytes]:
        answers, reply = self.answering, self.reply
        for event in reply.begin(answers.usage.prompt):
            yield event
        try:
            index, delta = self.first
            while True:
                for event in (reply.ended(index, answers.choices[index]) if delta is None else
                              reply.more(index, delta)):
                    yield event
                index, delta = await anext(self.deltas)
        except StopAsyncIteration:
            for event in reply.end(answers.usage):
                yield event
        except Refusal as refusal:
            for event in reply.failed(refusal):
                yield event


async def unless_gone(receive: Receive, work: Awaitable[Any]) -> Any:
    """Return the result of `work`, or None if the client leaves before."""
    doing, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((doing, gone), return_when=asyncio.FIRST_COMPLETED)
        return doing.result() if doing.done() else None
    finally:
        for task in (doing, gone):
            task.cancel()


async def _exhausted(deltas: AsyncIterator[Any]) -> bool:
    async for _ in deltas:
        pass
    return True


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
