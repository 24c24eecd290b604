"""`generate` holds answers to a schema, an expression or a grammar: greedy, sampled, in batches and with drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from serving.served import byte_tokenizer, save_byte_model

import forebay
from forebay.rewriter.machine.profile import Machine
from forebay.structured_output import StructuredOutputError

pytest.importorskip("llguidance")
SCHEMA = {"type": "object", "properties": {"yes": {"type": "boolean"}, "n": {"enum": [1, 2]}}, "required": ["yes", "n"],
          "additionalProperties": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytes")
    save_byte_model(folder, "{{ messages }}")
    return folder


def answers(lm: Any, count: int, **options: Any) -> list[str]:
    tokenizer = byte_tokenizer()
    prompts = torch.tensor(tokenizer(["one", "two"][:count]).input_ids)
    whole = lm.generate(prompts, max_new_tokens=60, **options)
    return [tokenizer.decode(row[3:], skip_special_tokens=True) for row in whole]


class Pydantic:
    """A class whose schema is known, as one of pydantic."""

    @staticmethod
    def model_json_schema() -> dict[str, Any]:
        return SCHEMA


def test_answers_are_json(folder: Path) -> None:
    with forebay.wrap(folder, "9MB", machine=Machine.default()) as lm:
        for count, options in ((1, {}), (2, {"json_schema": json.dumps(SCHEMA)}), (2, {"json_schema": Pydantic}),
                               (2, {"do_sample": True, "tokenizer": byte_tokenizer()}),
                               (2, {"do_sample": True, "generator": [torch.Generator(), torch.Generator()]})):
            for text in answers(lm, count, **{"do_sample": False, "json_schema": SCHEMA, **options}):
                value = json.loads(text)
                assert type(value["yes"]) is bool and value["n"] in (1, 2)
        assert set(answers(lm, 1, do_sample=False, regex="[ab]{3}")[0]) <= {"a", "b"}
        assert answers(lm, 1, grammar='start: "x" "y"') == ["xy"]
        for options, says in (({"json_schema": SCHEMA, "num_beams": 2}, "json_schema, regex and grammar go with"),
                              ({"json_schema": SCHEMA, "regex": "a"}, "json_schema and regex cannot"),
                              ({"regex": "("}, ".")):
            with pytest.raises(ValueError, match=says):
                answers(lm, 1, **options)
        with pytest.raises(StructuredOutputError, match="objec"):
            answers(lm, 1, json_schema={"type": "objec"})


def test_drafts_change_no_answer(folder: Path) -> None:
    found = []
    for drafts in (None, 3):
        with forebay.wrap(folder, "9MB", machine=Machine.default(), prompt_lookup_num_tokens=drafts) as lm:
            found.append(answers(lm, 1, do_sample=False, regex='("ab": "ab", ){8}x'))
            assert drafts is None or lm.plan.schedule.speculative_steps
    assert found[0] == found[1] and len(found[0][0]) >= 60 and ('"ab": "ab", ' * 8 + "x").startswith(found[0][0])
