"""Answers of `generate` that hold to `json_schema`, `regex` or `grammar`."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any
from weakref import WeakKeyDictionary

from forebay.runtime.run.logits_processing import Constraint
from forebay.runtime.run.request import NO_ADAPTER
from forebay.step_model import StepModel
from forebay.structured_output import OutputGrammar, StructuredOutput

NAMES = ("json_schema", "regex", "grammar")
LOOP = "greedy decoding and sampling by temperature, top_k and top_p"
_MADE: WeakKeyDictionary[StepModel, dict[frozenset[int], StructuredOutput]] = WeakKeyDictionary()  # by end tokens


def take_grammar(options: dict[str, Any]) -> OutputGrammar | None:
    """Take what answers must be out of a call's options; a schema is an object of JSON, its text, or a class of
    pydantic. ValueError for several."""
    given = {name: value for name in NAMES if (value := options.pop(name, None)) is not None}
    if len(given) > 1:
        raise ValueError(f"generate: {' and '.join(given)} cannot go together; leave one out")
    for name, value in given.items():
        if name != "json_schema":
            return OutputGrammar("regex" if name == "regex" else "grammar", value)
        value = value.model_json_schema() if hasattr(value, "model_json_schema") else value
        return OutputGrammar.of_schema(json.loads(value) if isinstance(value, str) else value)
    return None


def take_adapters(options: dict[str, Any]) -> list[str]:
    """Take `adapter_names` out of a call's options: one for each prompt, "__base__" for none, as PEFT has them."""
    names = options.pop("adapter_names", None) or []
    return ["" if name == NO_ADAPTER else name for name in names]


def constraining(
    lm: StepModel, grammar: OutputGrammar, tokenizer: Any, eos: Collection[int], plain: bool
) -> Callable[[], Constraint]:
    """Return the factory of each answer's constraint; the tokenizer is that of the model's folder where none is given.
    ValueError unless the call is `plain`."""
    if not plain:
        raise ValueError(f"generate: json_schema, regex and grammar go with {LOOP}; leave the others out")
    structured = StructuredOutput(tokenizer, lm.captured.vocab_size, eos) if tokenizer else _of_folder(lm, eos)
    structured.constraint(grammar)  # refused before anything runs
    return lambda: structured.constraint(grammar)


def _of_folder(lm: StepModel, eos: Collection[int]) -> StructuredOutput:
    """The constraints by the tokenizer of a model's folder, which is read once: half a second."""
    from forebay.commands.plain_tokenizer import plain_tokenizer
    from forebay.commands.prompts import load_tokenizer

    made, folder = _MADE.setdefault(lm, {}), lm.checkpoint.folder
    if frozenset(eos) not in made:
        tokenizer = plain_tokenizer(folder) or load_tokenizer(folder)
        made[frozenset(eos)] = StructuredOutput(tokenizer, lm.captured.vocab_size, eos)
    return made[frozenset(eos)]
