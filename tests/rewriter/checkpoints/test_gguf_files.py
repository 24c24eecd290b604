"""What ends an answer and how text is split are what a GGUF file says of them."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from selection import without
from tiny_gguf import VOCAB, copy_of, write_model
from transformers import AutoTokenizer

from forebay.commands.prompts import load_tokenizer, stop_ids
from forebay.rewriter.checkpoints.gguf_config import gguf_model
from forebay.rewriter.checkpoints.gguf_files import ENDING_TEXTS, write_model_files
from forebay.rewriter.checkpoints.gguf_header import read_gguf

SPECIAL = VOCAB - 1  # the id of the last token


def written(path: Path, changes: dict[str, Any], out: Path) -> Path:
    """The files beside the weights of a tiny model with other metadata; None takes a key away."""
    write_model(path, "llama", kinds=("F32",))
    header = read_gguf(copy_of(path, path.with_name("changed.gguf"), changes))
    out.mkdir()
    write_model_files(header, gguf_model(header), out, torch.float32)
    return out


def with_token(path: Path, text: str, kind: int) -> dict[str, Any]:
    """Changes that make the last token another one, of that kind: 3 is control, 1 is text."""
    write_model(path, "llama", kinds=("F32",))
    fields = gguf.GGUFReader(path).fields
    tokens, kinds = (list(fields[f"tokenizer.ggml.{name}"].contents()) for name in ("tokens", "token_type"))
    return {"tokenizer.ggml.tokens": [*tokens[:-1], text], "tokenizer.ggml.token_type": [*kinds[:-1], kind]}


@pytest.mark.parametrize(("changes", "ends"), [
    ({}, [1]), ({"tokenizer.ggml.eot_token_id": 106}, [1, 106]),
    ({"tokenizer.ggml.eot_token_id": 106, "tokenizer.ggml.eom_token_id": 107}, [1, 106, 107]),
    ({"tokenizer.ggml.eot_token_id": 1}, [1]), ({"tokenizer.ggml.eot_token_id": VOCAB}, [1]),
    ({"tokenizer.ggml.eos_token_id": None, "tokenizer.ggml.eom_token_id": 107}, [107]),
    ({"tokenizer.ggml.eos_token_id": None}, []), ({"tokenizer.ggml.eos_token_id": "x"}, []),
    ({"tokenizer.ggml.eos_token_id": [1, 105], "tokenizer.ggml.eot_token_id": [106, 107]}, [1, 105, 106, 107]),
])
def test_ends_of_turns_and_messages_end_an_answer(tmp_path: Path, changes: dict[str, Any], ends: list[int]) -> None:
    out = written(tmp_path / "m.gguf", changes, tmp_path / "out")
    assert sorted(stop_ids(out, load_tokenizer(out))) == ends
    for name in ("config.json", "generation_config.json"):
        told = json.loads((out / name).read_text()).get("eos_token_id")
        assert told == (ends if len(ends) > 1 else ends[0] if ends else None)


@pytest.mark.parametrize("text", without(sorted(ENDING_TEXTS), sorted(ENDING_TEXTS)[1::2]))
def test_tokens_that_end_an_answer_are_known_by_their_text(tmp_path: Path, text: str) -> None:
    """Whatever their kind is said to be, beside the ends that the file names."""
    control = with_token(tmp_path / "m.gguf", text, 3)
    for number, (changes, ends) in enumerate((
        (control, [1, SPECIAL]), (with_token(tmp_path / "m.gguf", text, 1), [1, SPECIAL]),
        (control | {"tokenizer.ggml.token_type": None}, [1, SPECIAL]),
        (control | {"tokenizer.ggml.eot_token_id": 106}, [1, 106, SPECIAL]),
    )):
        out = written(tmp_path / "m.gguf", changes, tmp_path / f"out{number}")
        assert sorted(stop_ids(out, load_tokenizer(out))) == ends


@pytest.mark.parametrize(("texts", "ends"), [
    (("<|end|>", "<|return|>", "<|call|>"), {"<|return|>", "<|call|>"}),
    (("<|end|>", "<|flush|>", "<|calls|>"), {"<|flush|>", "<|calls|>"}),
    (("<|end|>", "<|return|>", "<|im_end|>"), {"<|end|>", "<|return|>", "<|im_end|>"}),
])
def test_the_end_of_a_message_is_no_end_of_an_answer(tmp_path: Path, texts: tuple[str, ...], ends: set[str]) -> None:
    """gpt-oss ends its reasoning by <|end|>, whatever the file names as the end of a turn."""
    changes = with_token(tmp_path / "m.gguf", "", 3)
    tokens, kinds = changes["tokenizer.ggml.tokens"][:-3], changes["tokenizer.ggml.token_type"][:-3]
    changes = {"tokenizer.ggml.tokens": [*tokens, *texts], "tokenizer.ggml.token_type": [*kinds, 3, 3, 3],
               "tokenizer.ggml.eot_token_id": VOCAB - 3}
    out = written(tmp_path / "m.gguf", changes, tmp_path / "out")
    assert sorted(stop_ids(out, load_tokenizer(out))) == [1, *(VOCAB - 3 + texts.index(t) for t in texts if t in ends)]


@pytest.mark.parametrize(("pre", "pieces", "warned"), [
    ("gpt-2", ["a", "Ġ12", "b"], ""), ("smollm", ["a", "Ġ", "1", "2", "b"], ""),
    ("starcoder", ["a", "Ġ", "1", "2", "b"], ""), ("llama-bpe", ["a", "Ġ", "12", "b"], ""),
    ("qwen2", ["a", "Ġ", "1", "2", "b"], ""), ("stablelm2", ["a", "Ġ", "1", "2", "b"], ""),
    ("default", ["a", "Ġ12", "b"], r"the pre-tokenizer 'default', which this release does not know \(tokenizer"),
    ("of-tomorrow", ["a", "Ġ12", "b"], "the pre-tokenizer 'of-tomorrow', which this release does not know"),
    (None, ["a", "Ġ12", "b"], "names no pre-tokenizer"),
])
def test_text_is_split_as_the_file_says(tmp_path: Path, pre: str | None, pieces: list[str], warned: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = written(tmp_path / "m.gguf", {"tokenizer.ggml.pre": pre}, tmp_path / "out")
    said = " ".join(str(w.message) for w in caught if issubclass(w.category, UserWarning))
    assert re.search(warned, said) if warned else not said
    backend = AutoTokenizer.from_pretrained(out).backend_tokenizer
    assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("a 12b")] == pieces
