"""Bounds on what a tokenizer that came with a model may do to a text: a few steps of it can multiply one to terabytes.

Steps are known by their fields, as the tokenizers library knows them too where a step names no type.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forebay.rewriter.garbage import no_collection
from forebay.rewriter.ir.files import read_input

MOST_GROWTH = 64  # bytes of a text for each of its bytes, after all steps of one kind
MOST_STEPS = 256  # of one kind
MOST_TOKENS = 1024  # that templates make of a text of one
MOST_AFFIX = 64  # characters that a model puts before or after each part of a word
MOST_WORD = 10_000  # characters of a word that a model splits by trying every part
MOST_MAPPED = 64  # bytes for one character in a map of characters; Unicode's own forms take 33
KINDS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
LISTS = ("normalizers", "pretokenizers", "processors", "decoders")  # the fields of a sequence that hold its steps


class UnboundedTokenizer(ValueError):
    """A tokenizer that may make too much of a text; the message says which part of it."""


def check_folder(folder: Path) -> None:
    """Check every file of a folder that may be read as a tokenizer, before anything else reads it.

    Raises:
        UnboundedTokenizer: One makes too much of a text.
    """
    with no_collection():  # a vocabulary is many small objects
        for path in sorted(folder.glob("tokenizer*.json")):
            try:
                content = json.loads(read_input(path)) if path.is_file() else None
            except (OSError, ValueError, RecursionError):
                continue  # the library says what is wrong
            if isinstance(content, dict):
                check_steps(path.name, {kind: content.get(kind) for kind in KINDS})
                _check_model(path.name, content.get("model"))


def check_loaded(tokenizer: Any) -> None:
    """Check the steps of transformers' tokenizer, whatever file they came from.

    Raises:
        UnboundedTokenizer: They make too much of a text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    steps = {kind: json.loads(part.__getstate__()) for kind in KINDS if (part := getattr(backend, kind, None))}
    check_steps("the tokenizer", steps)


def check_steps(name: str, steps_by_kind: dict[str, Any]) -> None:
    """Check the steps of each kind, as JSON has them; `name` is that of the file."""
    for kind, component in steps_by_kind.items():
        steps = list(_steps(component))
        if len(steps) > MOST_STEPS:
            raise UnboundedTokenizer(f"the {kind} of {name} has {len(steps)} steps; at most {MOST_STEPS} are "
                                     "allowed")
        if (growth := _growth(steps)) > MOST_GROWTH:
            raise UnboundedTokenizer(f"the {kind} of {name} may make a text {growth} times as long; at most "
                                     f"{MOST_GROWTH} times are allowed")
        if (tokens := _tokens_of_one(steps)) > MOST_TOKENS:
            raise UnboundedTokenizer(f"the {kind} of {name} may make {tokens} tokens of one; at most {MOST_TOKENS} are "
                                     "allowed")


def _check_model(name: str, model: Any) -> None:
    if not isinstance(model, dict):
        return
    for field in ("continuing_subword_prefix", "end_of_word_suffix"):
        if len(_text(model.get(field))) > MOST_AFFIX:
            raise UnboundedTokenizer(f"{field} of {name} has {len(model[field])} characters; at most {MOST_AFFIX} are "
                                     "allowed")
    longest = model.get("max_input_chars_per_word")
    if isinstance(longest, int) and longest > MOST_WORD:
        raise UnboundedTokenizer(f"max_input_chars_per_word of {name} is {longest}; at most {MOST_WORD} is allowed")


def _steps(component: Any) -> Iterator[dict[str, Any]]:
    """The steps of a component, those of sequences in sequences one after the other."""
    waiting = [component]
    while waiting:
        step = waiting.pop()
        if not isinstance(step, dict):
            continue
        inner = [each for field in LISTS if isinstance(step.get(field), list) for each in step[field]]
        waiting += reversed(inner)
        if not inner:
            yield step


def _growth(steps: list[dict[str, Any]]) -> int:
    """At most how many bytes the steps make of one, without the ends of a text and Unicode's normal forms.

    A replacement multiplies what earlier ones wrote only if its pattern may match there.
    """
    growth, written = 1, ""
    for step in steps:
        if "pattern" in step and "content" in step:
            content, literal = _text(step["content"]), _literal(step["pattern"])
            alone = literal and not set(literal) & set(written)  # no part of a match was written by an earlier step
            longer = _nbytes(content) // (_nbytes(literal) if alone else 1)
            growth = growth + longer if literal and literal not in written else growth * (1 + longer)
            written += f"{content}\0"
        elif "prepend" in step or "replacement" in step:
            content = _text(step.get("prepend", step.get("replacement")))
            growth += _nbytes(content)
            written += f"{content}\0"
        elif "precompiled_charsmap" in step:
            longest = _longest_mapped(step["precompiled_charsmap"])
            if longest > MOST_MAPPED:
                growth *= longest
        elif step.get("type") in ("ByteLevel", "BertNormalizer") or "use_regex" in step:
            growth *= 2
    return growth


def _literal(pattern: Any) -> str:
    """The text that a pattern matches; empty for an expression, which may match anything."""
    return _text(pattern.get("String")) if isinstance(pattern, dict) else _text(pattern)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _nbytes(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


def _longest_mapped(charsmap: Any) -> int:
    """Bytes of the longest text that a map of characters puts in one's place. Its own size comes first, then a trie of
    that size, then the texts, each up to a zero."""
    try:
        found = base64.b64decode(_text(charsmap), validate=True)
    except ValueError:
        return 0
    texts = found[4 + int.from_bytes(found[:4], "little") :]
    return max(map(len, texts.split(b"\0")), default=0)


def _tokens_of_one(steps: list[dict[str, Any]]) -> int:
    """At most how many tokens templates make of a text that has one: copies of it, and special tokens around it."""
    tokens = 1
    for step in steps:
        special = step.get("special_tokens")
        lengths = [len(each["ids"]) for each in special.values() if isinstance(each, dict) and isinstance(
            each.get("ids"), list)] if isinstance(special, dict) else []
        for field in ("single", "pair"):
            pieces = step.get(field)
            if isinstance(pieces, list):
                copies = sum("Sequence" in piece for piece in pieces if isinstance(piece, dict))
                tokens = tokens * max(1, copies) + max([1, *lengths]) * (len(pieces) - copies)
    return tokens
