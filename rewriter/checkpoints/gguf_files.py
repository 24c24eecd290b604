"""Files of a model folder, made from a GGUF model: config, tokenizer, and the tokens that end an answer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.rewriter.checkpoints.gguf_config import described
from forebay.rewriter.checkpoints.gguf_header import GgufHeader
from forebay.rewriter.checkpoints.gguf_tokenizer import ENDING_TEXTS, read_tokenizer
from forebay.rewriter.one_thread import one_thread

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

ENDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
# Where a vocabulary has both of a pair, <|end|> ends a message of an answer, and not the answer.
OF_MESSAGES = ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"}, {"<|flush|>", "<|call|>"})


@one_thread
def write_model_files(header: GgufHeader, model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """Write all that is not a weight of `model`, which `header` describes and which computes in `dtype`."""
    from transformers import GenerationConfig

    config = copy.deepcopy(model.config)
    tokenizer = None
    if "tokenizer.ggml.tokens" in header.metadata:
        with described(header.path):
            tokenizer = read_tokenizer(header)
            tokenizer.save_pretrained(folder)
    ends = answer_ends(header, config.eos_token_id, config.vocab_size, tokenizer)
    config.eos_token_id = ends[0] if len(ends) == 1 else ends or None
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)


def answer_ends(header: GgufHeader, eos: int | None, vocabulary: int, tokenizer: Any) -> list[int]:
    """The ids of the tokens that end an answer: of a text, of a turn and of a message to a tool."""
    added = {} if tokenizer is None else tokenizer.added_tokens_decoder
    ends = {id: token.content for id, token in added.items() if token.special and token.content in ENDING_TEXTS}
    of_messages = {id for id, text in ends.items() if text == "<|end|>" and any(
        pair <= set(ends.values()) for pair in OF_MESSAGES)}
    told = [header.metadata.get(key) for key in ENDS]
    ids = dict.fromkeys([eos, *(at for each in told for at in (each if isinstance(each, tuple) else (each,))),
                         *sorted(ends)])
    return [id for id in ids if isinstance(id, int) and 0 <= id < vocabulary and id not in of_messages]
