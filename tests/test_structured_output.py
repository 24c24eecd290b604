"""Answers hold to schemas, expressions and grammars, drafted or not, whatever the model says."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
import torch
from selection import ALL
from serving.served import byte_tokenizer

from forebay.runtime.run.drafts import Drafted
from forebay.runtime.run.request import Request
from forebay.runtime.run.sampling import Sampling
from forebay.runtime.run.token_sampler import TokenSampler
from forebay.structured_output import GrammarConstraint, OutputGrammar, StructuredOutput, StructuredOutputError

pytest.importorskip("llguidance")
EOS, VOCABULARY, MOST = 1, 320, 400


@pytest.fixture(scope="module")
def structured() -> StructuredOutput:
    """Of a model whose vocabulary has more tokens than the tokenizer."""
    return StructuredOutput(byte_tokenizer(), VOCABULARY, [EOS])


def answer(constraint: GrammarConstraint, seed: int, drafted: list[int] | None = None) -> list[int]:
    """The answer of a random model under a constraint, the closing of texts and lists likelier than not; with drafts
    that are right for a while."""
    logits = torch.randn(64, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    logits[:, [EOS, *byte_tokenizer().convert_tokens_to_ids(['"', "}", "]"])]] += 4.0
    new: dict[int, list[int]] = {0: []}
    request = Request(torch.tensor([0]), MOST, lambda: torch.Generator().manual_seed(seed), Sampling(True, 1.0, 0, 1.0),
                      lambda: constraint)
    sampler, draw = TokenSampler(Sampling(), {0: request}, new, None), random.Random(seed)
    while len(new[0]) < MOST and EOS not in new[0]:
        at, draft = len(new[0]), []
        if drafted is not None:
            draft = drafted[at:][: draw.randrange(4)]
            draft[-1:] = [draw.randrange(VOCABULARY)] if draft and draw.random() < 0.5 else draft[-1:]
        rows = logits[[(at + i) % 64 for i in range(len(draft) + 1)]]
        may = constraint.allowed([])[0].nonzero()[:, 0].tolist()
        assert may == [EOS] or constraint.only() == (may[0] if len(may) == 1 else None)
        for token in sampler.accepted(0, rows, Drafted(tuple(draft))) if draft else sampler.chosen([0], rows, [0]):
            sampler.taken(0, token)
            new[0].append(token)
            if token == EOS:
                break
    return new[0]


def random_schema(draw: random.Random, depth: int = 2) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", *(["object", "array", "any"] * depth)]
    kind = draw.choice(kinds)
    if kind == "object":
        names = draw.sample(["a", "name", "é", 'q"', "deep", "x y"], draw.randint(0, 4))
        return {"type": "object", "properties": {name: random_schema(draw, depth - 1) for name in names},
                "required": draw.sample(names, draw.randint(0, len(names))), "additionalProperties": False}
    if kind == "array":
        return {"type": "array", "items": random_schema(draw, depth - 1), "maxItems": draw.randint(1, 3)}
    if kind == "any":
        return {"anyOf": [random_schema(draw, depth - 1) for _ in range(2)]}
    return {"string": {"type": "string", "maxLength": draw.randint(1, 9)}, "integer": {"type": "integer", "minimum": 0,
            "maximum": draw.randint(1, 999)}, "number": {"type": "number", "minimum": -1, "maximum": 1},
            "enum": {"enum": ["one", 2, None]}, "const": {"const": "c"}}.get(kind, {"type": kind})


def conforms(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is as a schema of `random_schema` has it."""
    if "anyOf" in schema:
        return any(conforms(value, each) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    kind = schema["type"]
    if kind == "object":
        return isinstance(value, dict) and set(schema["required"]) <= set(value) <= set(schema["properties"]) and all(
            conforms(value[name], schema["properties"][name]) for name in value)
    if kind == "array":
        return isinstance(value, list) and len(value) <= schema["maxItems"] and all(
            conforms(each, schema["items"]) for each in value)
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    if kind in ("integer", "number"):
        return (type(value) is int or (kind == "number" and type(value) is float)) and (
            schema["minimum"] <= value <= schema["maximum"])
    return value is None if kind == "null" else type(value) is bool


def test_answers_are_what_the_schema_says(structured: StructuredOutput) -> None:
    complete, seeds = 0, range(1000 if ALL else 25)
    for seed in seeds:
        schema = random_schema(random.Random(seed))
        grammar = OutputGrammar.of_schema(schema)
        ids = answer(structured.constraint(grammar), seed)
        if ids[-1] == EOS:  # a number may have as many digits as it likes
            assert conforms(json.loads(structured.tokenizer.decode(ids[:-1])), schema), (seed, schema)
            complete += 1
        assert answer(structured.constraint(grammar), seed, ids) == ids, "drafts change the answer"
    assert complete > 0.9 * len(seeds)


@pytest.mark.parametrize(("grammar", "pattern"), [
    (OutputGrammar("regex", "[0-9]{2}/[ab]+c"), "[0-9]{2}/[ab]+c"), (OutputGrammar.of_choices(["a+b", "é"]), r"a\+b|é"),
    (OutputGrammar("grammar", 'start: "x" num+\nnum: /[0-9]/ ";"'), "x([0-9];)+"),
    (OutputGrammar("grammar", 'root ::= "x" num+\nnum ::= [0-9] ";"'), "x([0-9];)+"),
])
def test_expressions_and_grammars(structured: StructuredOutput, grammar: OutputGrammar, pattern: str) -> None:
    for seed in range(4):
        ids = answer(structured.constraint(grammar), seed)
        assert ids[-1] != EOS or re.fullmatch(pattern, structured.tokenizer.decode(ids[:-1]))
        assert ids[-1] == EOS or "+" in pattern


def test_tokens_beyond_the_logits_are_not_allowed() -> None:
    """A tokenizer may have more tokens than the model gives logits for."""
    tokenizer = byte_tokenizer()
    one, twelve = tokenizer.convert_tokens_to_ids(["1", "12"])
    for size, only in ((twelve, one), (twelve + 1, None)):
        constraint = StructuredOutput(tokenizer, size, [EOS]).constraint(OutputGrammar("regex", "1[23]"))
        assert constraint.only() == only and len(constraint.allowed([])[0]) == size


def test_reasoning_before_a_mark_is_free(structured: StructuredOutput) -> None:
    closes = structured.tokenizer.convert_tokens_to_ids("</think>")
    for grammar in (OutputGrammar.of_schema({"type": "boolean"}), OutputGrammar("regex", "a/b")):
        constraint = structured.constraint(grammar, "</think>")
        for token in structured.tokenizer("any {text").input_ids:
            assert bool(constraint.allowed([])[0][token])
            constraint.advance(token)
        constraint.advance(closes)
        text = structured.tokenizer.decode(answer(constraint, 1)[:-1]).strip()
        assert text in ("true", "false", "a/b")


@pytest.mark.parametrize("bad", [
    lambda: OutputGrammar.of_schema([1]), lambda: OutputGrammar.of_schema({"type": "objec"}),
    lambda: OutputGrammar("regex", "(a"), lambda: OutputGrammar("grammar", "start: nothing"),
    lambda: OutputGrammar("grammar", "root ::= ("), lambda: OutputGrammar("json_schema", "{bad")])
def test_what_is_no_grammar_is_said_in_one_line(structured: StructuredOutput, bad: Any) -> None:
    with pytest.raises(StructuredOutputError) as refused:
        structured.constraint(bad())
    assert "\n" not in str(refused.value) and str(refused.value)
