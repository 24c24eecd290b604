"""Answers that hold to a JSON schema, a regular expression or a grammar: masks over tokens, made by llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}
MOST_ERROR_CHARACTERS = 400
ANY_OBJECT: dict[str, Any] = {"type": "object"}


class StructuredOutputError(ValueError):
    """A grammar that cannot be held to; the message says why."""


@dataclass(frozen=True)
class OutputGrammar:
    """The grammar of an answer: `text` is a JSON schema, a regular expression, or a grammar of Lark or GBNF."""

    kind: Literal["json_schema", "regex", "grammar"]
    text: str

    @staticmethod
    def of_schema(schema: Any) -> OutputGrammar:
        """The grammar of JSON that a schema describes, without white space but a space after commas and colons."""
        if not isinstance(schema, dict):
            raise StructuredOutputError("a JSON schema must be an object")
        return OutputGrammar("json_schema", json.dumps({**schema, "x-guidance": COMPACT}))

    @staticmethod
    def of_choices(texts: Sequence[str]) -> OutputGrammar:
        """The grammar of one of several texts."""
        return OutputGrammar("regex", "|".join(re.escape(text) for text in texts))


class StructuredOutput:
    """Constraints for answers of a model.

    Args:
        tokenizer: The model's, plain or a fast one of transformers.
        vocab_size: Of the model's logits.
        eos: Tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos: Collection[int]) -> None:
        self.tokenizer, self.vocab_size, self.eos = tokenizer, vocab_size, frozenset(eos)

    def constraint(self, grammar: OutputGrammar, after: str | None = None) -> GrammarConstraint:
        """Make the constraint of one answer by a grammar; StructuredOutputError where that cannot be.

        Args:
            grammar: Of the answer.
            after: A mark, such as that of reasoning's end, until which the answer is free.
        """
        llguidance = _llguidance()
        with _in_one_line():
            matcher = llguidance.LLMatcher(self._tokens, self._compiled(grammar, after), log_level=0)
            if matcher.is_error():
                raise StructuredOutputError(matcher.get_error())
        return GrammarConstraint(matcher, self.vocab_size, self.eos)

    def _compiled(self, grammar: OutputGrammar, after: str | None) -> str:
        if after is None or grammar.kind == "grammar":
            return _compiled(grammar)
        marks = self.tokenizer.get_added_vocab()
        free = f"free: /(.|\\n)*/ {after}" if after in marks else f'free[suffix="{after}"]: /(.|\\n)*/'
        said = f"%json {grammar.text}" if grammar.kind == "json_schema" else f"/{_unslashed(grammar.text)}/"
        return str(_llguidance().LLMatcher.grammar_from_lark(f"start: free /\\s*/ answer\n{free}\nanswer: {said}\n"))

    @cached_property
    def _tokens(self) -> Any:
        """The tokenizer as llguidance has it, made once: a second for a large vocabulary."""
        backend = copy(self.tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        return _llguidance().LLTokenizer(backend.to_str(), n_vocab=max(self.vocab_size, len(self.tokenizer)),
                                         eos_token=sorted(self.eos) or self.tokenizer.eos_token_id)


class GrammarConstraint:
    """The tokens that may follow in one answer (`Constraint` of the loop that generates tokens)."""

    def __init__(self, matcher: Any, vocab_size: int, eos: frozenset[int]) -> None:
        self.matcher, self.vocab_size, self.eos = matcher, vocab_size, eos
        self._bits: bytes | None = None  # of the next token, once asked for

    def only(self) -> int | None:
        """Return the next token, where no other is allowed."""
        bits = int.from_bytes(self._next(), "little") & ((1 << self.vocab_size) - 1)
        return bits.bit_length() - 1 if bits.bit_count() == 1 else None

    def allowed(self, drafted: Sequence[int]) -> list[torch.Tensor]:
        """Return whether each token may come next, bool [V], after every prefix of `drafted` that is itself allowed."""
        masks, taken = [self._unpacked(self._next())], 0
        for token in drafted:
            if token in self.eos or not masks[-1][token] or self.matcher.try_consume_tokens([token]) != 1:
                break
            taken += 1
            masks.append(self._unpacked(self.matcher.compute_bitmask()))
        if taken:
            self.matcher.rollback(taken)
        return masks

    def advance(self, token: int) -> None:
        """Take the next token of the answer."""
        if token not in self.eos:
            self._bits = None
            self.matcher.consume_token(token)

    def _next(self) -> bytes:
        if self._bits is None:
            self._bits = self.matcher.compute_bitmask()
        return self._bits

    def _unpacked(self, bits: bytes) -> torch.Tensor:
        allowed = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")[: self.vocab_size].view(np.bool_)
        if not allowed.any():  # the tokenizer has no token to go on with
            allowed[sorted(self.eos)] = True
        return torch.from_numpy(allowed)


def check_grammar(grammar: OutputGrammar) -> None:
    """Raise StructuredOutputError for a grammar that no model can be held to."""
    with _in_one_line():
        if error := _llguidance().LLMatcher.validate_grammar(_compiled(grammar)):
            raise StructuredOutputError(error)


def _compiled(grammar: OutputGrammar) -> str:
    """A grammar as llguidance reads it."""
    from llguidance.gbnf_to_lark import any_to_lark

    make = _llguidance().LLMatcher
    if grammar.kind == "json_schema":
        return str(make.grammar_from_json_schema(grammar.text))
    if grammar.kind == "regex":
        return str(make.grammar_from_regex(grammar.text))
    return str(make.grammar_from_lark(any_to_lark(grammar.text)))


def _llguidance() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise StructuredOutputError('structured output needs llguidance: pip install "forebay[structured]"') from error
    return llguidance


@contextmanager
def _in_one_line() -> Iterator[None]:
    """Raise StructuredOutputError in one line for what llguidance says of a grammar, which is an Exception of any kind.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise StructuredOutputError(" ".join(f"{error}".split())[:MOST_ERROR_CHARACTERS]) from error


def _unslashed(pattern: str) -> str:
    """A regular expression between slashes."""
    return re.sub(r"(?<!\\)/", r"\\/", pattern)
