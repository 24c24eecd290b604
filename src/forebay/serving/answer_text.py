"""The text of an answer as its tokens come: no half of a character is told, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class AnswerText:
    """Text of tokens, up to the first of `stops` or a token of `eos`. What `tell` gave, joined, is `text` at the end.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str], eos: frozenset[int]) -> None:
        self._decode, self._stops, self._eos = decode, tuple(stops), eos
        self.ids: list[int] = []
        self.text = ""
        self.stopped = False
        self.stop: str | None = None  # the string that ended it
        self._told = 0

    def add(self, token: int) -> bool:
        """Take the next token; whether more are wanted."""
        self.ids.append(token)
        if token in self._eos:
            self.stopped = True
            return False
        text = self._decode(self.ids)
        ends = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            end, self.stop = min(ends)
            text, self.stopped = text[:end], True
        self.text = text
        return not self.stopped

    def tell(self, last: bool) -> str:
        """Return the new text that can be sent; all of it after the `last` token."""
        end = len(self.text)
        if not last:
            end = len(self.text.rstrip("\ufffd"))  # the next token may complete a character
            held = max((overlap(self.text[:end], stop) for stop in self._stops), default=0)
            end -= held
        new = self.text[self._told : end]
        self._told = max(self._told, end)
        return new


def overlap(text: str, mark: str) -> int:
    """Characters at the end of `text` that may be the beginning of `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
