"""Tokenizers of GGUF files give the ids of the tokenizer.json that the file was made from."""

from __future__ import annotations

import json
import random
import re
import warnings
from pathlib import Path
from typing import Any

import gguf
import pytest
from tiny_gguf import add_setting, copy_of, finish, write_model
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from forebay.commands.prompts import load_tokenizer
from forebay.rewriter.checkpoints.gguf_config import described
from forebay.rewriter.checkpoints.gguf_header import GgufHeader, read_gguf
from forebay.rewriter.checkpoints.gguf_tokenizer import read_tokenizer
from forebay.rewriter.checkpoints.records import CheckpointError

CONTROL, DEFINED, NORMAL, UNUSED, BYTE = 3, 4, 1, 5, 6
WORDS = ["don't", "I'LL", "naïve", "Αθήνα", "über", "XMLHttp", "e\u0301te\u0301", "中文字符", "かな", "한국어", "Ђорђе",
         "12345", "3.14", "a_b", "==", "!?", "<|end|>", "<think>", "<｜end▁of▁sentence｜>", "½", "ա", "🙂", "\u200d"]
SPACES = [" ", "  ", "\n", "\n\n ", "\t", " \r\n", "   \n", ""]
# As tokenizer.json has it, of models that everybody knows.
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
          r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
          r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
DEEPSEEK3 = [r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+",
             r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
             r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"]


def split(*patterns: str) -> Any:
    return pre_tokenizers.Sequence([*(pre_tokenizers.Split(Regex(each), "isolated") for each in patterns),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def gpt2(*before: Any) -> Any:
    return pre_tokenizers.Sequence([*before, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])


# Each by the name that llama.cpp's converter gives it: how it splits, whether texts begin with <s>, and what more.
FORMS: dict[str, tuple[Any, bool, dict[str, Any]]] = {
    "gpt-2": (gpt2(), False, {}), "smollm": (gpt2(pre_tokenizers.Digits(individual_digits=True)), False, {}),
    "llama-bpe": (split(LLAMA3), True, {"ignore_merges": True}), "qwen2": (split(QWEN2), False, {"nfc": True}),
    "tekken": (split(TEKKEN), True, {"ignore_merges": True}), "dbrx": (split(LLAMA3), False, {}),
    "deepseek-v3": (split(*DEEPSEEK3), False, {}), "stablelm2": (split(QWEN2), False, {}),
}


def text_of(seed: int) -> str:
    draw = random.Random(seed)
    return "".join(draw.choice(WORDS) + draw.choice(SPACES) for _ in range(40))


def byte_level(form: str) -> tuple[Tokenizer, list[str], list[int], list[str]]:
    """A trained tokenizer of a form; tokens, kinds and merges as llama.cpp's converter writes them."""
    splitter, bos, more = FORMS[form]
    made = Tokenizer(models.BPE(ignore_merges=more.get("ignore_merges", False)))
    made.pre_tokenizer, made.decoder = splitter, decoders.ByteLevel()
    if "nfc" in more:
        made.normalizer = normalizers.NFC()
    # Merges of one way to split, which other ways meet differently.
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = gpt2()
    learned.train_from_iterator([text_of(n) for n in range(40)], trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    state = json.loads(learned.to_str())["model"]
    merges, vocab = [tuple(pair) for pair in state["merges"]], dict(state["vocab"])
    whole = "Ġ" + "".join(sorted("don't"))  # a token that no merges make
    for token in ("naÃ¯ve" + "!", whole, "Ġnaïve", "ĠXMLHttp"):
        vocab.setdefault(token, len(vocab))
    made.model = models.BPE(vocab=vocab, merges=merges, ignore_merges=more.get("ignore_merges", False))
    made.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in (
        "<s>", "<|end|>", "<｜end▁of▁sentence｜>")])
    made.add_tokens([AddedToken("<think>", normalized=False)])
    tokens = [made.id_to_token(i) for i in range(made.get_vocab_size())]
    tokens += ["[PAD1]", "[PAD2]"]
    kinds = {"<s>": CONTROL, "<|end|>": CONTROL, "<｜end▁of▁sentence｜>": CONTROL, "<think>": DEFINED}
    if bos:
        made.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))])
    return made, tokens, [kinds.get(t, UNUSED if "PAD" in t else NORMAL) for t in tokens], [" ".join(m) for m in merges]


def written(path: Path, arrays: dict[str, Any], **told: Any) -> GgufHeader:
    """The header of a file that has a tokenizer and nothing else."""
    architecture = told.pop("architecture", "llama")
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in told.items():
        add_setting(writer, key.replace("__", ".") if key.startswith("tokenizer") else f"tokenizer.ggml.{key}", value)
    writer.add_token_list(arrays["tokens"])
    writer.add_token_types(arrays["kinds"])
    if "scores" in arrays:
        writer.add_token_scores(arrays["scores"])
    if "merges" in arrays:
        writer.add_token_merges(arrays["merges"])
    finish(writer)
    return read_gguf(path)


@pytest.mark.parametrize("form", FORMS)
def test_ids_of_byte_level_tokenizers(tmp_path: Path, form: str) -> None:
    """Of texts with all kinds of letters, spaces and added tokens; what is saved gives them too."""
    theirs, tokens, kinds, merges = byte_level(form)
    header = written(tmp_path / "m.gguf", {"tokens": tokens, "kinds": kinds, "merges": merges}, model="gpt2", pre=form,
                     bos_token_id=theirs.token_to_id("<s>"), eos_token_id=theirs.token_to_id("<｜end▁of▁sentence｜>"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = read_tokenizer(header)
    ours.save_pretrained(tmp_path)
    assert len(ours) == len(tokens) and ours.eos_token_id == theirs.token_to_id("<｜end▁of▁sentence｜>")
    assert (ours("a")["input_ids"][0] == ours.bos_token_id) == FORMS[form][1]
    for seed in range(30):
        text = text_of(100 + seed)
        ids = theirs.encode(text).ids
        assert ours(text)["input_ids"] == ids and ours.decode(ids, skip_special_tokens=False) == theirs.decode(
            ids, skip_special_tokens=False)
    assert load_tokenizer(tmp_path)(text)["input_ids"] == ids


def sentencepiece(prefix: bool) -> tuple[Tokenizer, dict[str, Any]]:
    """A SentencePiece model of merges, and the tokens, scores and kinds that it has in a file."""
    texts = [text_of(n).replace(" ", "▁").replace("<|end|>", "") for n in range(30)]
    learned = Tokenizer(models.BPE())
    learned.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=400, show_progress=False, limit_alphabet=60))
    pieces = [learned.id_to_token(i) for i in range(learned.get_vocab_size())]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "<think>",
              *(p for p in pieces if p != "<think>")]
    special = {"<unk>": 2, "<s>": CONTROL, "</s>": CONTROL, "<think>": DEFINED}
    kinds = [special.get(t, BYTE if re.fullmatch("<0x..>", t) else NORMAL) for t in tokens]
    scores = [0.0 if kind != NORMAL else -float(at) for at, kind in enumerate(kinds)]
    vocab = {t: i for i, t in enumerate(tokens)}
    # SentencePiece merges the pair whose piece has the best score, as merges in the order of their results do.
    merges = [(p[:i], p[i:]) for p in pieces for i in range(1, len(p)) if p[:i] in vocab and p[i:] in vocab]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [normalizers.Prepend("▁")] if prefix else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    made.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in ("<s>", "</s>", "<unk>")])
    made.add_tokens([AddedToken("<think>", normalized=False)])
    return made, {"tokens": tokens, "kinds": kinds, "scores": scores}


@pytest.mark.parametrize(("prefix", "bos"), [(True, None), (False, None), (None, False)])
def test_ids_of_sentencepiece_tokenizers(tmp_path: Path, prefix: bool | None, bos: bool | None) -> None:
    """Whether a space leads and <s> begins is what the file says, and both are so where it does not."""
    theirs, arrays = sentencepiece(prefix is not False)
    told = {} if prefix is None else {"add_space_prefix": prefix}
    told |= {} if bos is None else {"add_bos_token": bos}
    ours = read_tokenizer(written(tmp_path / "m.gguf", arrays, model="llama", **told))
    for seed in range(30):
        text = "a" + re.sub("<think>|▁", "", text_of(200 + seed))  # tokenizers disagree on a space after added tokens
        ids = theirs.encode(text).ids
        assert ours(text)["input_ids"] == ([1] if bos is None else []) + ids
        assert ours.decode(ids) == text


def test_bytes_are_read_where_no_token_has_a_character(tmp_path: Path) -> None:
    _, arrays = sentencepiece(True)
    ours = read_tokenizer(written(tmp_path / "m.gguf", arrays, model="llama", add_bos_token=False))
    assert [arrays["tokens"][i] for i in ours("a🙃")["input_ids"]][-4:] == ["<0xF0>", "<0x9F>", "<0x99>", "<0x83>"]


@pytest.mark.parametrize(("pre", "told", "begins"), [
    ("gpt-2", {}, False), ("gpt-2", {"add_bos_token": True}, True), ("llama-bpe", {}, True),
    ("llama-bpe", {"add_bos_token": False}, False),
])
def test_what_a_text_begins_and_ends_with(tmp_path: Path, pre: str, told: dict[str, Any], begins: bool) -> None:
    write_model(tmp_path / "m.gguf", "llama", kinds=("F32",))
    changes = {f"tokenizer.ggml.{key}": value for key, value in ({"pre": pre, "add_eos_token": True} | told).items()}
    ours = read_tokenizer(read_gguf(copy_of(tmp_path / "m.gguf", tmp_path / "n.gguf", changes)))
    ids = ours("he")["input_ids"]
    assert (ids[0] == ours.bos_token_id) == begins and ids[-1] == ours.eos_token_id
    assert len(ids) == 2 + begins


def test_chat_templates_by_name(tmp_path: Path) -> None:
    """The unnamed one is that of chats; without it those that have a name are kept."""
    write_model(tmp_path / "m.gguf", "llama", kinds=("F32",))
    tools = {"tokenizer.chat_template.tool_use": "with tools", "tokenizer.chat_templates": ["tool_use"]}
    for number, changes in enumerate(({"tokenizer.chat_template": "plain"} | tools, tools)):
        out = tmp_path / f"out{number}"
        header = read_gguf(copy_of(tmp_path / "m.gguf", tmp_path / f"{number}.gguf", changes))
        read_tokenizer(header).save_pretrained(out)
        found = load_tokenizer(out)
        assert found.get_chat_template(tools=[{}]) == "with tools"
        if number == 0:
            assert found.get_chat_template() == "plain"


@pytest.mark.parametrize("name", ["../escaped", "a/b", "", "..", "a b", "/tmp/escaped"])
def test_names_of_templates_lead_out_of_no_folder(tmp_path: Path, name: str) -> None:
    """Each becomes the name of a file."""
    write_model(tmp_path / "m.gguf", "llama", kinds=("F32",))
    changes = {"tokenizer.chat_template": "plain", f"tokenizer.chat_template.{name}": "other"}
    ours = read_tokenizer(read_gguf(copy_of(tmp_path / "m.gguf", tmp_path / "n.gguf", changes)))
    ours.save_pretrained(tmp_path / "out")
    assert ours.chat_template == "plain" and not list(tmp_path.rglob("*escaped*"))


@pytest.mark.parametrize(("changes", "message"), [
    ({"tokenizer.ggml.model": "bert"}, r"kind 'bert' \(tokenizer.ggml.model\)"),
    ({"tokenizer.ggml.merges": ["he"]}, "does not describe a usable model|out of vocabulary"),
    ({"tokenizer.ggml.tokens": 3}, "tokenizer.ggml.tokens is no list"),
])
def test_a_tokenizer_of_no_kind_that_is_read_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_model(tmp_path / "m.gguf", "llama", kinds=("F32",))
    header = read_gguf(copy_of(tmp_path / "m.gguf", tmp_path / "n.gguf", changes))
    with pytest.raises(CheckpointError, match=message), described(header.path):
        read_tokenizer(header)
