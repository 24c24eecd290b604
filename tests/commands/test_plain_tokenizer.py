"""A tokenizer read without transformers gives what transformers gives, or is not used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from forebay.commands.plain_tokenizer import plain_tokenizer
from forebay.commands.prompts import load_tokenizer
from forebay.huggingface.served import asks_nothing_more
from forebay.rewriter.checkpoints.resolve import demo_checkpoint

TEXTS = ["The capital of France is", "  two  spaces\n\nand lines ", "Übergröße 東京 🚀",
         "<|im_start|>user\nHi<|im_end|>\n", "a" * 5000, "don't , you ' re ."]


def test_ids_and_text_are_those_of_transformers() -> None:
    folder = demo_checkpoint()
    plain, whole = plain_tokenizer(folder), load_tokenizer(folder)
    assert plain is not None and plain.eos_token_id == whole.eos_token_id
    for text in TEXTS:
        ids = whole(text)["input_ids"]
        assert plain(text)["input_ids"] == ids
        for skip in (True, False):
            assert plain.decode(ids, skip_special_tokens=skip) == whole.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("change", [{"add_bos_token": True}, {"tokenizer_class": "LlamaTokenizer"},
                                    {"clean_up_tokenization_spaces": True}, {"eos_token": {"content": "x"}}])
def test_what_asks_for_more_is_left_to_transformers(tmp_path: Path, change: dict) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_checkpoint() / name, tmp_path / name)
    assert plain_tokenizer(tmp_path) is not None
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | change))
    assert plain_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text("{")
    assert plain_tokenizer(tmp_path) is None


@pytest.mark.parametrize(("asked", "plain"), [
    ({"eos_token_id": 2, "do_sample": True, "temperature": 0.6, "use_cache": True, "output_scores": False}, True),
    ({"repetition_penalty": 1.1}, False), ({"use_cache": False}, False), ({"output_scores": True}, False)])
def test_generation_that_asks_for_more_is_left_to_transformers(tmp_path: Path, asked: dict, plain: bool) -> None:
    assert not asks_nothing_more(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(asked))
    assert asks_nothing_more(tmp_path) is plain
