"""Folders of tiny models that make embeddings, as sentence-transformers saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers as T
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(96))]
SIZES: dict[str, Any] = dict(vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
                             num_attention_heads=4, max_position_embeddings=64, pad_token_id=0)
CONFIGS = {
    "bert": lambda: T.BertConfig(**SIZES), "mpnet": lambda: T.MPNetConfig(**SIZES | {"pad_token_id": 1}),
    "distilbert": lambda: T.DistilBertConfig(vocab_size=100, dim=32, hidden_dim=64, n_layers=4, n_heads=4,
                                             max_position_embeddings=64),
    "xlm-roberta": lambda: T.XLMRobertaConfig(**SIZES | {"pad_token_id": 1, "max_position_embeddings": 66}),
    "modernbert": lambda: T.ModernBertConfig(**SIZES | {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2,
                                                       "eos_token_id": 3}),
    "qwen3": lambda: T.Qwen3Config(**SIZES | {"num_key_value_heads": 2, "head_dim": 8}),
    "gemma3": lambda: T.Gemma3TextConfig(**SIZES | {
        "num_key_value_heads": 2, "head_dim": 8, "use_bidirectional_attention": True, "sliding_window": 8})}


def tokenizer(pad: int = 0, side: str = "right") -> T.PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", [("[CLS]", 2), ("[SEP]", 3)])
    return T.PreTrainedTokenizerFast(tokenizer_object=made, pad_token=WORDS[pad], unk_token="[UNK]",
                                     cls_token="[CLS]", sep_token="[SEP]", padding_side=side, model_max_length=60)


def save(kind: str, folder: Path, auto: Any = T.AutoModel, **config: Any) -> Any:
    """A model with weights that matter, and its tokenizer; the model is returned."""
    torch.manual_seed(0)
    made = CONFIGS[kind]()
    for name, value in config.items():
        setattr(made, name, value)
    model = auto.from_config(made).eval()
    for p in model.parameters():
        if p.dim() > 1:
            p.data.normal_(0, 0.3)
    model.save_pretrained(folder)
    tokenizer(made.pad_token_id or 0, "left" if kind == "qwen3" else "right").save_pretrained(folder)
    return model


def save_modules(folder: Path, pooling: dict[str, Any], *, normalize: bool = True, **general: Any) -> None:
    """Files of sentence-transformers for a model's folder."""
    kinds = ["Transformer", "Pooling", *["Normalize"] * normalize]
    paths = ["", "1_Pooling", "2_Normalize"]
    (folder / "modules.json").write_text(json.dumps([
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=False))]))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 16, "do_lower_case": False}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(general))
