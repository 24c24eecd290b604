"""Tokenizers that cannot do their work are one line: of the prompt that they refuse, or of the job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from forebay.commands.plain_tokenizer import plain_tokenizer
from forebay.commands.prompts import PromptLine, encode, load_tokenizer
from forebay.commands.terminal import JobError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer of two words whose [UNK] is none of them."""
    raw = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(tmp_path)
    return tmp_path


def encoded(folder: Path) -> tuple[list[tuple[int, ...]], list[tuple[int, str]]]:
    """Ids of two prompts, of which the second has an unknown word, and the bad lines with the beginning of why."""
    requests = [PromptLine(i, i, text) for i, text in enumerate(("a b", "a c"), start=1)]
    prompts, bad = encode(requests, load_tokenizer(folder), chat=False, vocab_size=2)
    return [prompt.ids for prompt in prompts], [(line.line, line.reason.partition(": ")[0]) for line in bad]


def test_a_word_that_the_tokenizer_has_no_token_for_is_a_bad_line(folder: Path) -> None:
    assert encoded(folder) == ([(0, 1)], [(2, "the tokenizer refuses it")])


def test_a_longest_prompt_that_is_no_number_refuses_every_prompt(folder: Path) -> None:
    configured(folder, {"model_max_length": "x"})
    assert encoded(folder) == ([], [(1, "the tokenizer refuses it"), (2, "the tokenizer refuses it")])


@pytest.mark.parametrize("change", [{"eos_token": 7}, {"eos_token": {"content": 3}}])
def test_a_tokenizer_of_wrong_settings_is_named(folder: Path, change: dict[str, Any]) -> None:
    configured(folder, change)
    with pytest.raises(JobError, match=rf"{folder} holds no usable tokenizer"):
        load_tokenizer(folder)


def test_a_tokenizer_that_makes_its_library_panic_is_named(tmp_path: Path) -> None:
    """A panic of Rust is no Exception."""
    raw = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    spoiled = json.loads(path.read_text())
    spoiled["model"]["continuing_subword_prefix"] = "longer than b"
    path.write_text(json.dumps(spoiled))
    with pytest.raises(BaseException, match="out of range") as panicked:
        Tokenizer.from_file(str(path))
    assert not isinstance(panicked.value, Exception)
    with pytest.raises(JobError, match=rf"{tmp_path} holds no usable tokenizer"):
        load_tokenizer(tmp_path)
    assert plain_tokenizer(tmp_path) is None


def configured(folder: Path, change: dict[str, Any]) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
