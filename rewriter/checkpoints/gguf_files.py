"""What a model folder holds beside weights, from a GGUF model: its config, its tokenizer, and what ends an answer."""

from __future__ import annotations

import copy
import json
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.rewriter.checkpoints.config import LOCAL_ONLY
from forebay.rewriter.checkpoints.gguf_config import described
from forebay.rewriter.checkpoints.gguf_header import GgufHeader
from forebay.rewriter.one_thread import one_thread

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

ENDS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
# Tokens that end a turn, for files from before `eot_token_id`: llama.cpp knows them by their text, too.
TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
# Pre-tokenizers that split text as GPT-2 or Qwen2 do, and those that split off each digit before. Source: llama.cpp,
# src/llama-vocab.cpp.
AS_GPT2 = ("gpt-2", "gpt2", "mpt", "olmo", "jais", "phi-2", "roberta-bpe", "gigachat", "trillion", "granite-docling")
AS_QWEN2 = ("stablelm2", "hunyuan", "solar-open")
DIGITS = ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b")


@one_thread
def write_model_files(header: GgufHeader, model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """Write all that is not a weight of `model`, which `header` describes and which computes in `dtype`."""
    from transformers import GenerationConfig

    config = copy.deepcopy(model.config)
    tokenizer = None
    if "tokenizer.ggml.tokens" in header.metadata:
        with described(header.path):
            tokenizer = _read_tokenizer(header)
            tokenizer.save_pretrained(folder)
    ends = answer_ends(header, config.eos_token_id, config.vocab_size, tokenizer)
    config.eos_token_id = ends[0] if len(ends) == 1 else ends or None
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)


def answer_ends(header: GgufHeader, eos: int | None, vocabulary: int, tokenizer: Any) -> list[int]:
    """The ids of the tokens that end an answer: of a text, of a turn and of a message to a tool."""
    told = [header.metadata.get(key) for key in ENDS]
    ids = [eos, *told]
    if told[0] is None and tokenizer is not None:
        added = tokenizer.added_tokens_decoder.items()
        ids += [id for id, token in added if token.special and token.content in TURN_ENDS]
    return list(dict.fromkeys(id for id in ids if isinstance(id, int) and 0 <= id < vocabulary))


@one_thread
def _read_tokenizer(header: GgufHeader) -> Any:
    from transformers import TokenizersBackend  # whatever the architecture, which AutoTokenizer asks for

    with _alone(header.path) as only:
        tokenizer = TokenizersBackend.from_pretrained(only, gguf_file=header.path.name, **LOCAL_ONLY)
    if header.metadata.get("tokenizer.ggml.model") == "gpt2":
        _split_text(header, tokenizer)
    return tokenizer


@one_thread
def _split_text(header: GgufHeader, tokenizer: Any) -> None:
    """Split text as the file's pre-tokenizer says, where transformers has left it as GPT-2 does; warn if that is a
    guess."""
    from tokenizers import Regex, pre_tokenizers
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    how = header.metadata.get("tokenizer.ggml.pre")
    backend = tokenizer.backend_tokenizer
    if json.loads(backend.to_str())["pre_tokenizer"]["type"] != "ByteLevel" or how in AS_GPT2:
        return
    if how in (*DIGITS, *AS_QWEN2):
        pattern = r"\p{N}" if how in DIGITS else PRETOKENIZE_REGEX
        backend.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=how in DIGITS)])
        return
    what = "no pre-tokenizer" if how is None else f"the pre-tokenizer {how!r}, which this release does not know"
    warnings.warn(f"{header.path} names {what} (tokenizer.ggml.pre): text is split as GPT-2 does, and may become other "
                  "tokens than the model was trained on; take the tokenizer of the model's safetensors checkpoint",
                  stacklevel=4)


@contextmanager
def _alone(path: Path) -> Iterator[Path]:
    """A folder in which `path` is the only file: transformers would read the settings of another model beside it."""
    with tempfile.TemporaryDirectory(prefix="forebay-gguf-") as folder:
        (Path(folder) / path.name).symlink_to(path.resolve())
        yield Path(folder)
