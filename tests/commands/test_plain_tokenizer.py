"""A tokenizer read without transformers gives what transformers gives, or is not used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from forebay.commands.chat_template import ChatTemplate
from forebay.commands.plain_tokenizer import plain_tokenizer
from forebay.commands.prompts import PromptLine, load_tokenizer, prompt_ids, takes_chats
from forebay.commands.terminal import JobError
from forebay.huggingface.served import asks_nothing_more, named_sampling
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
        bare = whole(text, add_special_tokens=False)["input_ids"]
        assert plain(text, add_special_tokens=False)["input_ids"] == bare


def test_the_vocabulary_is_that_of_transformers() -> None:
    folder = demo_checkpoint()
    plain, whole = plain_tokenizer(folder), load_tokenizer(folder)
    assert plain is not None and len(plain) == len(whole) and plain.get_added_vocab() == whole.get_added_vocab()
    assert sorted(plain.all_special_ids) == sorted(whole.all_special_ids)  # type: ignore[type-var]
    words = ["<|im_start|>", "the", "no such token"]
    assert plain.convert_tokens_to_ids(words) == whole.convert_tokens_to_ids(words)
    assert plain.backend_tokenizer.to_str() == whole.backend_tokenizer.to_str()


def test_chats_are_those_of_transformers() -> None:
    folder = demo_checkpoint()
    chats = []
    for tokenizer in (plain_tokenizer(folder), load_tokenizer(folder)):
        with ChatTemplate(tokenizer) as template:
            chats.append(prompt_ids(PromptLine(1, 1, TEXTS[2]), tokenizer, template, takes_chats(tokenizer, None)))
    assert chats[0] == chats[1] and len(chats[0]) > len(plain_tokenizer(folder)(TEXTS[2])["input_ids"])  # type: ignore[misc]


def test_a_template_in_a_file_of_its_own_is_the_one(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_checkpoint() / name, tmp_path / name)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}[{{ messages[0].content }}]")
    plain, whole = plain_tokenizer(tmp_path), load_tokenizer(tmp_path)
    assert plain is not None and plain.get_chat_template() == whole.get_chat_template()
    (tmp_path / "additional_chat_templates").mkdir()
    assert plain_tokenizer(tmp_path) is None, "several, of which transformers knows which"


@pytest.mark.parametrize(("template", "asked", "taken"), [
    ("x", None, True), ("x", False, False), (None, None, False), (None, False, False), ("x", True, True)])
def test_prompts_go_through_the_template_where_there_is_one(
    template: str | None, asked: bool | None, taken: bool
) -> None:
    assert takes_chats(SimpleNamespace(chat_template=template), asked) is taken


def test_a_template_that_is_asked_for_and_missing_is_refused() -> None:
    with pytest.raises(JobError, match="no chat template"):
        takes_chats(SimpleNamespace(chat_template=None), True)


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


@pytest.mark.parametrize(("text", "named"), [
    ('{"temperature": 0.6, "top_k": 20, "min_p": null, "eos_token_id": 2}', {"temperature": 0.6, "top_k": 20}),
    ("{}", {}), ('{"temperature": "warm"}', None), ('{"top_p": true}', None), ("[1]", None), ("{", None), (None, None)])
def test_sampling_is_read_where_it_is_plain(tmp_path: Path, text: str | None, named: dict | None) -> None:
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text)
    assert named_sampling(tmp_path) == named
