"""Perplexity and next-word accuracy: the numbers of plain transformers, within the budget."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from budgets import attention_nbytes
from selection import at_length
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from forebay.commands.evaluate import eval_command, next_word_accuracy, open_scorer, perplexity, read_passages
from forebay.commands.terminal import JobError
from forebay.rewriter.ir.plan import Budget
from forebay.rewriter.machine.profile import Machine, save_machine
from forebay.rewriter.planning.options import Options

app = typer.Typer()
app.command()(eval_command)

VOCAB = 120
COMMON = dict(vocab_size=VOCAB, bos_token_id=1, eos_token_id=2, pad_token_id=0)
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
                         intermediate_size=96, max_position_embeddings=64, tie_word_embeddings=True, **COMMON),
    "gpt2": GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=64, **COMMON),
}
NBYTES = 4 * 160_000  # more than the weights of either take
TAKEN = attention_nbytes(4, 4, 34, 32)  # of the largest
IDS = torch.randint(3, VOCAB, (75,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _saved(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _saved("llama", tmp_path_factory.mktemp("named"))


def _saved(name: str, folder: Path, opening: bool = False) -> Path:
    """A random model whose logits spread, and a tokenizer of words w3 to w119."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    model.save_pretrained(folder)
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="w3"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if opening:
        raw.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="<pad>").save_pretrained(
        folder)
    save_machine(Machine.default(), folder / "machine.json")
    return folder


@torch.no_grad()
def _log_probabilities(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """[T - 1] of the tokens but the first."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logits = torch.log_softmax(model(ids[None, :-1]).logits[0].double(), -1)
    return logits.gather(1, ids[1:, None])[:, 0]


def _text(ids: torch.Tensor) -> str:
    return " ".join(f"w{i}" for i in ids.tolist())


@pytest.mark.parametrize("share", [at_length(2.0), 0.6])
def test_perplexity_is_that_of_plain_transformers(folder: Path, share: float) -> None:
    """Windows that do not divide the text, in memory and streamed, two at a time, in chunks."""
    expected = torch.cat([_log_probabilities(folder, IDS[i : i + 21]) for i in range(0, 74, 20)])
    weights = sum(p.numel() * 4 for p in AutoModelForCausalLM.from_pretrained(folder).parameters())
    budget = Budget(int(weights * share) + 200_000 + attention_nbytes(2, 4, 21, 16))
    with open_scorer(folder, budget, Options(batch=2, machine=Machine.default()), context=20) as lm:
        streamed = [w.name for w in lm.plan.weights if w.tier == "disk" and not w.gather]
        assert bool(streamed) == (share < 1)
        found = perplexity(lm, IDS, 20)
    assert (found.tokens, found.windows) == (74, 4) == (expected.numel(), 4)
    assert found.loss == pytest.approx(-expected.mean().item(), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(-expected.mean().item()), rel=1e-4)


def test_overlapping_windows_count_every_token_once(llama: Path) -> None:
    ids = IDS[:50]
    expected = _log_probabilities(llama, ids[:21]).sum()
    for start in range(8, 50, 8):
        end = min(start + 20, 49)
        fresh = min(start + 12, 49)
        if fresh == end:
            break
        expected += _log_probabilities(llama, ids[start : end + 1])[fresh - start :].sum()
    with open_scorer(llama, Budget(NBYTES + TAKEN), Options(machine=Machine.default()), context=20) as lm:
        found = perplexity(lm, ids, 20, 8)
        assert found.tokens == 49
        assert found.loss == pytest.approx(-expected.item() / 49, rel=1e-5)


def test_an_opening_token_stands_before_every_window(tmp_path: Path) -> None:
    folder = _saved("llama", tmp_path / "opening", opening=True)
    bos = torch.tensor([1])
    ids = IDS[:30]
    # 16 tokens of input: the opening one and 15 of the text, the last window's from token 15 on
    first = _log_probabilities(folder, torch.cat((bos, ids[:16])))
    second = _log_probabilities(folder, torch.cat((bos, ids[15:])))[1:]
    with open_scorer(folder, Budget(NBYTES + TAKEN), Options(machine=Machine.default()), context=16) as lm:
        found = perplexity(lm, _text(ids), 16)
    assert found.tokens == 30
    assert found.loss == pytest.approx(-torch.cat((first, second)).mean().item(), rel=1e-5)


def test_scores_tell_the_likeliest_token(llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    with torch.no_grad():
        ids = model.generate(IDS[None, :10], max_new_tokens=12, do_sample=False, eos_token_id=None)[0]
        best = model(ids[None, :-1]).logits[0].argmax(-1)
    with open_scorer(llama, Budget(NBYTES + TAKEN), Options(batch=2, machine=Machine.default()), context=32) as lm:
        scores, shorter = lm.token_scores([ids, ids[:13]])
    assert torch.equal(scores[:, 1].bool(), best == ids[1:]) and scores[9:, 1].all()
    assert torch.equal(shorter, scores[:12])


def test_next_words(llama: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    lines = []
    for start in range(6):
        ids = IDS[start : start + 5 + start]
        with torch.no_grad():
            token = int(model(ids[None]).logits[0, -1].argmax())
        word = token if start % 3 else (token + 1) % VOCAB
        lines.append(json.dumps({"text": _text(ids) + f" w{max(3, word)}"}))
    path = tmp_path / "words.jsonl"
    path.write_text("\n".join(lines) + "\n\n")
    with open_scorer(llama, Budget(NBYTES + TAKEN), Options(batch=4, machine=Machine.default()), context=8) as lm:
        found = next_word_accuracy(lm, read_passages(llama, path))
    assert (found.right, found.words, found.accuracy) == (4, 6, 4 / 6)


def _eval(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_command_prints_json_within_the_budget(llama: Path, tmp_path: Path) -> None:
    text, words = tmp_path / "text.txt", tmp_path / "words.jsonl"
    text.write_text(_text(IDS))
    words.write_text(json.dumps({"text": _text(IDS[:9])}))
    budget = (500 << 10) + TAKEN
    result = _eval(llama, "--text", text, "--words", words, "--budget", f"device={budget}", "--context", 20,
                   "--json", "--machine", llama / "machine.json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    expected = torch.cat([_log_probabilities(llama, IDS[i : i + 21]) for i in range(0, 74, 20)])
    assert found["perplexity"] == pytest.approx(math.exp(-expected.mean().item()), rel=1e-4)
    assert found["tokens"] == 74 and found["words"] == 1 and found["next_word_accuracy"] in (0, 1)
    assert found["budget"] == budget and 0 < found["planned_peak"] <= found["budget"]
    assert found["time_s"] > 0 and found["tokens_per_s"] > 0 and found["measured_peak"] >= 0
    shown = _eval(llama, "--text", text, "--context", 20, "--tokens", 30, "--machine", llama / "machine.json")
    assert shown.exit_code == 0 and "perplexity" in shown.stdout and "29 tokens" in shown.stdout


@pytest.mark.parametrize(("text", "words", "more", "message"), [
    (None, None, [], "name what to measure on"),
    ("w5", None, [], "at least 2 are needed"),
    ("w5 w6", None, ["--context", 64], "context of 64 tokens is too long"),
    ("w5 w6", None, ["--context", 20, "--stride", 21], "not 21"),
    (None, '{"text": "w5"}', ["--context", 20], "line 1: the text must have two words"),
    (None, '{"text": "w5 w6"}\n{}', ["--context", 20], "line 2"),
    (None, "\n", ["--context", 20], "no line"),
])
def test_mistakes_are_one_line(llama: Path, tmp_path: Path, text: str | None, words: str | None, more: list[Any],
                               message: str) -> None:
    given: list[object] = []
    for option, content in (("--text", text), ("--words", words)):
        if content is not None:
            (tmp_path / option[2:]).write_text(content)
            given += [option, tmp_path / option[2:]]
    if not any(option == "--context" for option in more):
        more = [*more, "--context", 16]
    result = _eval(llama, *given, *more, "--machine", llama / "machine.json")
    assert result.exit_code == 2 and message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_wrong_strides_are_refused(llama: Path) -> None:
    with (open_scorer(llama, Budget(NBYTES + TAKEN), Options(machine=Machine.default()), context=20) as lm,
          pytest.raises(JobError, match="not -1")):
        perplexity(lm, IDS, 20, -1)
