"""Tokenizers that multiply a text are refused before they see one, and those that break off are one line."""

from __future__ import annotations

import ast
import base64
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from forebay.commands.app import app
from forebay.commands.plain_tokenizer import plain_tokenizer
from forebay.commands.prompts import BadPrompt, ids_text, load_tokenizer, text_ids
from forebay.commands.terminal import JobError
from forebay.commands.tokenizer_bounds import KINDS, MOST_GROWTH, check_steps
from forebay.rewriter.checkpoints.named_errors import panicking
from forebay.rewriter.checkpoints.resolve import demo_checkpoint

ROOT = Path(__file__).parents[2]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
X64 = normalizers.Replace("a", "a" * 64)
BACKTRACKS = Regex("(a+)+c")


def saved(folder: Path, change: Callable[[Tokenizer], None] = lambda raw: None) -> Path:
    """A folder with a tokenizer of letters."""
    raw = Tokenizer(models.BPE({"a": 0, "b": 1, "<s>": 2}, []))
    raw.add_special_tokens(["<s>"])
    change(raw)
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<s>")
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)
    return folder


def spoiled(folder: Path, **fields: Any) -> Path:
    """A folder whose tokenizer.json was changed by somebody; what it holds is never loaded by the test itself."""
    path = saved(folder) / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def as_json(component: Any) -> Any:
    return json.loads(component.__getstate__())


def template(pieces: int, ids: int = 1, copies: int = 1) -> dict[str, Any]:
    token, text = {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    return {"type": "TemplateProcessing", "single": [*[token] * pieces, *[text] * copies], "pair": [text],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [2] * ids, "tokens": ["<s>"] * ids}}}


def untyped(step: dict[str, Any]) -> dict[str, Any]:
    """A step as files of old had it, which the library knows by its fields."""
    return {name: value for name, value in step.items() if name != "type"}


BOMBS: dict[str, dict[str, Any]] = {
    "six times 64": {"normalizer": as_json(normalizers.Sequence([X64] * 6))},
    "nested": {"normalizer": as_json(normalizers.Sequence([normalizers.Sequence([X64, X64]), X64]))},
    "once": {"normalizer": as_json(normalizers.Replace("a", "a" * 65))},
    "expressions": {"normalizer": as_json(normalizers.Sequence([normalizers.Replace(Regex("."), "xxxx")] * 6))},
    "without a type": {"normalizer": untyped(as_json(normalizers.Replace("a", "a" * 99)))},
    "prepended": {"normalizer": as_json(normalizers.Prepend("a" * 99))},
    "bytes of bytes": {"pre_tokenizer": as_json(pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 9))},
    "many steps": {"normalizer": as_json(normalizers.Sequence([normalizers.Lowercase()] * 300))},
    "decoder": {"decoder": as_json(decoders.Sequence([decoders.Replace("a", "a" * 9)] * 6))},
    "many pieces": {"post_processor": template(5000)},
    "long pieces": {"post_processor": template(50, ids=50)},
    "copies of copies": {"post_processor": {"type": "Sequence", "processors": [template(0, copies=3)] * 9}},
    "charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(
        b"\4\0\0\0abcd" + b"x" * 999 + b"\0").decode()}},
    "affix": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "end_of_word_suffix": "x" * 999}},
    "long words": {"model": {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a",
                             "continuing_subword_prefix": "##", "max_input_chars_per_word": 1 << 40}},
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_tokenizer_that_multiplies_a_text_is_refused(tmp_path: Path, bomb: str) -> None:
    spoiled(tmp_path, **BOMBS[bomb])
    assert plain_tokenizer(tmp_path) is None
    with pytest.raises(JobError, match=r"no usable tokenizer: .*tokenizer\.json .*at most") as refused:
        load_tokenizer(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_file_that_the_settings_name_is_checked_too(tmp_path: Path) -> None:
    spoiled(tmp_path, **BOMBS["six times 64"])
    (tmp_path / "tokenizer.json").rename(tmp_path / "tokenizer.5.0.0.json")
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fast_tokenizer_files": ["tokenizer.5.0.0.json"]}))
    with pytest.raises(JobError, match=r"tokenizer\.5\.0\.0\.json .*at most"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("steps", [
    [normalizers.Replace("a", "b" * 20), normalizers.Replace("b", "c" * 20)],
    [normalizers.Replace("a", "b" * 20), normalizers.Replace(Regex("b"), "c" * 20)],
    [normalizers.Prepend("aa"), normalizers.Replace("a", "aaaa"), normalizers.Replace("aa", "a" * 30)],
    [normalizers.Replace(" ", "▁"), normalizers.ByteLevel(), normalizers.ByteLevel()],
    [normalizers.Replace("a", "aaa"), normalizers.Replace("b", "bbb"), normalizers.Replace("c", "ab")],
    [normalizers.Replace(Regex("x*"), "yy"), normalizers.Replace("é", "")],
    [normalizers.Replace("c", "b" * 9), normalizers.Replace("b" * 9 + "a", "x" * 50)],
    [normalizers.Replace("a", "bb"), normalizers.Replace("bbbb", "x" * 50)],
])
def test_no_text_grows_more_than_is_computed(steps: list[Any]) -> None:
    """The bound is one of each tokenizer that is not refused, and of the library's own results here."""
    whole = normalizers.Sequence(steps)
    longest = max(len(whole.normalize_str(text).encode()) / len(text.encode())
                  for text in ("a" * 50, "b" * 50, "c" * 50, "é" * 50, "x" * 50, " " * 50, "abc é" * 20, "ca" * 50))
    computed = 0
    with pytest.MonkeyPatch.context() as patch:
        for allowed in range(1, 2000):
            patch.setattr("forebay.commands.tokenizer_bounds.MOST_GROWTH", allowed)
            try:
                check_steps("it", {"normalizer": as_json(whole)})
            except ValueError:
                continue
            computed = allowed
            break
    assert longest < computed + 0.5  # expressions may match once more, at the end


def test_usual_tokenizers_are_not_refused() -> None:
    """Steps as those of Llama 2, Gemma, T5, BERT and GPT-2 have them, and the demo's."""
    space = {"String": " "}
    charsmap = base64.b64encode(b"\4\0\0\0abcd" + "صلى الله عليه وسلم".encode() + b"\0a\0").decode()
    for steps in (
        [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": space, "content": "▁"}],
        [{"type": "Precompiled", "precompiled_charsmap": charsmap}, {"type": "Strip", "strip_left": False},
         {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}],
        [{"type": "BertNormalizer", "lowercase": True}, {"type": "NFKC"}, {"type": "ByteLevel", "use_regex": False}],
        [{"type": "Replace", "pattern": {"String": f"{c}"}, "content": f"<|{c}|>"} for c in "\t\n`´«»"],
    ):
        for kind in KINDS:
            check_steps("it", {kind: {"type": "Sequence", "normalizers": steps}})
    check_steps("it", {"post_processor": template(3)})
    demo = load_tokenizer(demo_checkpoint())
    assert text_ids(demo, "a b") and plain_tokenizer(demo_checkpoint()) is not None and MOST_GROWTH < 100


def test_an_expression_that_backtracks_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In prompts and in answers, read by transformers' tokenizer or without it; the library itself prints more."""
    def backtracking(raw: Tokenizer) -> None:
        raw.pre_tokenizer = pre_tokenizers.Split(BACKTRACKS, "isolated")
        raw.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace(BACKTRACKS, "x")])

    saved(tmp_path, backtracking)
    plain, whole = plain_tokenizer(tmp_path), load_tokenizer(tmp_path)
    assert plain is not None
    for tokenizer in (plain, whole):
        with pytest.raises(BadPrompt, match=r"the tokenizer refuses it: .* broke off: .*retry-limit") as refused:
            text_ids(tokenizer, "a" * 40)
        assert "\n" not in str(refused.value)
        with pytest.raises(JobError, match=r"cannot read the answer: .* broke off") as refused:
            ids_text(tokenizer, [0] * 40)
        assert "\n" not in str(refused.value)
        assert text_ids(tokenizer, "ab") == [0, 1]
    with pytest.raises(BadPrompt, match="bytes that are no text"):
        text_ids(tokenizer, os.fsdecode(b"a\xff"))
    assert capfd.readouterr().err == ""
    with pytest.raises(BaseException, match="retry-limit"):
        Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("a" * 40)
    assert "panicked" in capfd.readouterr().err


@pytest.mark.parametrize("options", [[], ["--chat"]])
def test_the_command_says_it_in_one_line(tmp_path: Path, options: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    def backtracking(raw: Tokenizer) -> None:
        raw.pre_tokenizer = pre_tokenizers.Split(BACKTRACKS, "isolated")

    saved(tmp_path, backtracking)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    found = CliRunner().invoke(app, ["run", str(tmp_path), "a" * 40, "--budget", "1MB", *options])
    assert found.exit_code == 2 and "retry-limit" in found.stderr and len(found.stderr.splitlines()) == 1
    assert capfd.readouterr().err == ""


def test_what_is_printed_meanwhile_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    """But for the time of a panic; of two that hold it, the last prints."""
    with panicking():
        os.write(2, b"one ")
        with panicking():
            os.write(2, b"two ")
        assert capfd.readouterr().err == ""
        os.write(2, b"three")
    assert capfd.readouterr().err == "one two three"
    with pytest.raises(KeyError), panicking():
        os.write(2, b"four")
        raise KeyError
    assert capfd.readouterr().err == "four"


def test_texts_and_chats_go_through_one_place_each() -> None:
    """No other call of a tokenizer, its decode or its template in the package."""
    found = []
    for part in ("src/forebay", "runtime", "rewriter"):
        for path in (ROOT / part).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call):
                    called = ast.unparse(node.func)
                    if called.rpartition(".")[2] in ("apply_chat_template", "render_jinja_template") or called in (
                            "tokenizer", "tokenizer.decode", "tokenizer.encode"):
                        found.append(f"{path.relative_to(ROOT)}: {called}")
    assert sorted(found) == [
        "src/forebay/commands/prompts.py: tokenizer", "src/forebay/commands/prompts.py: tokenizer.decode",
        "src/forebay/commands/render_chats.py: render_jinja_template"]
