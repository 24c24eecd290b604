"""Text from files that others made, as a terminal may be given it.

A name of a tensor, a file or a model may hold control characters. A terminal obeys them: it moves, hides and colors
text, sets its title, and some copy or type what they are told.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, TextIO

# Control characters but for tabs and newlines, those that turn the direction of text around, and halves of surrogate
# pairs, which no encoding has.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Write each character that a terminal would obey as its escape, as in `\\u001b`, which JSON reads back."""
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class PrintableError(Exception):
    """An error whose message may hold names from files: they are made `printable`."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(each) if isinstance(each, str) else each for each in args))


class PrintableStream:
    """A text stream that is given everything `printable`."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(printable(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def unfiltered(stream: TextIO) -> TextIO:
    """The stream that a `PrintableStream` writes to; of others themselves."""
    while isinstance(stream, PrintableStream):
        stream = stream.stream
    return stream
