"""Causal rerankers: scores by the recipe of each model's card, computed by transformers' module in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as T
from embedding.folders import SIZES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from forebay.commands.serve_texts import reads_texts
from forebay.embedding.reranker import Reranker, is_reranker
from forebay.embedding.sentence_files import is_embedder
from forebay.rewriter.checkpoints.records import CheckpointError

SPECIAL = ["<pad>", "<bos>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "yes", "no", "Yes", "1", "0"]
PAIRS = [("What is a budget?", "A limit in bytes."), ("What?", ""), ("cheese", "Brie is a kind of cheese.\n" * 9)]
GROUPED: Any = dict(SIZES, vocab_size=300, max_position_embeddings=2000, num_key_value_heads=2, head_dim=8)
CONFIGS: dict[str, Any] = {
    "qwen3": lambda: T.Qwen3Config(**GROUPED, tie_word_embeddings=True), "gemma": lambda: T.GemmaConfig(**GROUPED),
    "qwen2": lambda: T.Qwen2Config(**{k: v for k, v in GROUPED.items() if k != "head_dim"})}


def save(kind: str, folder: Path) -> tuple[Any, Any]:
    """A causal model, and a tokenizer of bytes."""
    torch.manual_seed(0)
    model = T.AutoModelForCausalLM.from_config(CONFIGS[kind]()).eval()
    for p in model.parameters():
        if p.dim() > 1:
            p.data.normal_(0, 0.2)
    model.save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = T.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<bos>",
                                          additional_special_tokens=SPECIAL[2:], model_max_length=2000)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def expected(kind: str, model: Any, tokenizer: Any, query: str, document: str, most: int) -> float:
    """One pair by itself, its prompt written as the card of each model has it."""
    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    if kind == "qwen3":
        before = ids('<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the '
                     'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n')
        after = ids("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
        body = ids("<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
                   f"<Query>: {query}\n<Document>: {document}")[: most - len(before) - len(after)]
        row = before + body + after
    elif kind == "gemma":
        after = ids("\nGiven a query A and a passage B, determine whether the passage contains an answer to the query "
                    "by providing a prediction of either 'Yes' or 'No'.")
        before = [tokenizer.bos_token_id, *ids(f"A: {query}\n")]
        row = before + ids(f"B: {document}")[: most - len(before) - len(after)] + after
    else:
        before = ids("<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
                     f"<|im_end|>\n<|im_start|>user\nquery: {query}\n")
        after = ids("\nYou are a search relevance expert who evaluates how well documents match search queries. For "
                    "each query-document pair, carefully analyze the semantic relationship between them, then provide "
                    "your binary relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:<|im_end|>\n"
                    "<|im_start|>assistant\n")
        row = before + ids(f"document: {document}")[: most - len(before) - len(after)] + after
    with torch.no_grad():
        logits = model(torch.tensor([row])).logits[0, -1]
    yes, no = (logits[tokenizer.convert_tokens_to_ids(word)] for word in {
        "qwen3": ("yes", "no"), "gemma": ("Yes", "no"), "qwen2": ("1", "0")}[kind])
    return float({"qwen3": torch.stack([no, yes]).softmax(0)[1], "gemma": yes, "qwen2": yes - no}[kind])


@pytest.mark.parametrize("kind", CONFIGS)
def test_scores_are_those_of_the_recipe(kind: str, tmp_path: Path) -> None:
    """Together, one by one and cut to fewer tokens, with memory for a layer at a time."""
    model, tokenizer = save(kind, tmp_path)
    lm = Reranker(tmp_path, "3MB")
    for most in (2000, 420):
        lm.max_seq_length = most
        wanted = [expected(kind, model, tokenizer, *pair, most) for pair in PAIRS]
        assert np.abs(lm.predict(PAIRS) - wanted).max() < 1e-5
        assert np.abs(lm.predict(PAIRS, batch_size=1) - wanted).max() < 1e-5
    assert len({round(each, 4) for each in wanted}) == 3, "documents must matter"
    assert lm.streamed.peak_nbytes <= 3_000_000
    best = lm.rank("cheese", [document for _, document in PAIRS])
    assert [each["score"] for each in best] == sorted((each["score"] for each in best), reverse=True)


def test_folders_are_told_apart(tmp_path: Path) -> None:
    """By files of sentence-transformers, else by the name; other causal models are refused by name."""
    plain, named = tmp_path / "Qwen3-0.6B", tmp_path / "Qwen3-Reranker-0.6B"
    for folder in (plain, named):
        save("qwen3", folder)
    assert is_reranker(named) and reads_texts(named) and not is_reranker(plain) and not reads_texts(plain)
    (plain / "modules.json").write_text(json.dumps([
        {"idx": i, "path": path, "type": f"sentence_transformers.{kind}"} for i, (path, kind) in enumerate([
            ("", "base.modules.transformer.Transformer"),
            ("1_LogitScore", "cross_encoder.modules.logit_score.LogitScore")])]))
    assert is_reranker(plain) and not is_embedder(plain)
    config = json.loads((named / "config.json").read_text())
    (named / "config.json").write_text(json.dumps(config | {"model_type": "llama", "architectures": ["A"]}))
    assert not is_reranker(named)
    with pytest.raises(CheckpointError, match="a causal model of type 'llama', which is no known reranker"):
        Reranker(named, "3MB")
