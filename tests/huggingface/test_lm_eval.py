"""lm-eval over a streamed model, held to lm-eval over the same model in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

pytest.importorskip("lm_eval", reason="pip install 'forebay[eval]'")

WORDS = ["the", "river", "runs", "down", "to", "sea", "and", "a", "mill", "wheel", "turns", "slowly", "while", "rain",
         "falls", "on", "stones", "."]
TEXTS = ["the river runs down to the sea .", "a mill wheel turns slowly while rain falls on the stones .",
         "rain falls and the river runs ."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a tokenizer of words."""
    path = tmp_path_factory.mktemp("model")
    vocab = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
                                         pad_token="<pad>").save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(vocab), hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=args, idx=i) for i, args in enumerate(arguments)]  # type: ignore[arg-type]


def test_as_lm_eval_over_the_model_in_memory(folder: Path) -> None:
    from lm_eval.models.huggingface import HFLM

    from forebay.lm_eval import ForebayLM

    ours = ForebayLM(str(folder), "400KB", batch_size=2)
    theirs = HFLM(str(folder), batch_size=2, device="cpu", dtype="float32", max_length=63,
                  logits_cache=False)  # its cache mixes up splits of one sequence into context and continuation
    pairs = [(" ".join(text.split()[:n]), " " + " ".join(text.split()[n:])) for text in TEXTS for n in (0, 2, 5)]
    pairs.append((" ".join(WORDS * 5), " the sea"))  # longer than the model's positions
    with ours.streamed:
        for a, b in zip(*(lm.loglikelihood(requests("loglikelihood", pairs)) for lm in (ours, theirs)), strict=True):
            assert a[0] == pytest.approx(b[0], abs=1e-3) and a[1] is bool(b[1])
        texts = [(text,) for text in (*TEXTS, " ".join(WORDS * 6))]
        found, expected = (lm.loglikelihood_rolling(requests("loglikelihood_rolling", texts)) for lm in (ours, theirs))
        assert found == pytest.approx(expected, abs=1e-3)
        asked = [(text, dict(until=["."], max_gen_toks=8)) for text in TEXTS]
        asked += [(text, dict(until=[], max_gen_toks=5, do_sample=False)) for text in TEXTS]
        said = [lm.generate_until(requests("generate_until", asked)) for lm in (ours, theirs)]
        assert said[0] == said[1]


def test_the_command_runs_a_task(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tmp_path / "rivers.yaml").write_text(json.dumps({  # JSON is YAML
        "task": "rivers", "dataset_path": "json", "dataset_kwargs": {"data_files": str(tmp_path / "docs.jsonl")},
        "test_split": "train", "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}]}))
    perplexity = []
    for module, model, arguments in (("forebay.lm_eval", "forebay", f"pretrained={folder},budget=400KB"),
                                     ("lm_eval", "hf", f"pretrained={folder},dtype=float32,max_length=63")):
        out = tmp_path / module
        done = subprocess.run(
            [sys.executable, "-m", module, "--model", model, "--model_args", arguments,
             "--tasks", "rivers", "--include_path", str(tmp_path), "--output_path", str(out), "--device", "cpu"],
            env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "GOMP_SPINCOUNT": "0"},
            capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        (results,) = out.rglob("results_*.json")
        perplexity.append(json.loads(results.read_text())["results"]["rivers"]["word_perplexity,none"])
    assert perplexity[0] == pytest.approx(perplexity[1], rel=1e-4)
