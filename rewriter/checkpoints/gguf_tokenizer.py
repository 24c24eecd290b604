"""The tokenizer of a GGUF model, from its vocabulary: the ids that the model was trained on, or a warning."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Sequence
from typing import Any

from forebay.rewriter.checkpoints.gguf_config import SENTENCEPIECE_IDS, first_id
from forebay.rewriter.checkpoints.gguf_header import GgufHeader, read_arrays
from forebay.rewriter.checkpoints.gguf_splits import ADD_BOS, NFC, WHOLE_WORDS, split_patterns
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.one_thread import one_thread

CONTROL, USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type
SPECIAL = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
           "pad_token": "padding_token_id"}
# Tokens that end an answer, whatever the file says of their kind: llama.cpp (src/llama-vocab.cpp) knows them by text.
ENDING_TEXTS = frozenset((
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>",
    "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["))
TEMPLATE = "tokenizer.chat_template"
SPACE = "\u2581"  # stands for a space in a SentencePiece vocabulary


@one_thread
def read_tokenizer(header: GgufHeader) -> Any:
    """The tokenizer, as transformers has it.

    Raises:
        CheckpointError: its kind is neither byte-level BPE (gpt2) nor SentencePiece (llama, gemma4).
    """
    from transformers import TokenizersBackend

    told = {key.removeprefix("tokenizer.ggml."): value for key, value in header.metadata.items()}
    arrays = read_arrays(header.path, [f"tokenizer.ggml.{key}" for key in ("tokens", "scores", "token_type", "merges")])
    tokens, scores, kinds, merges = arrays
    kind = told.get("model")
    if kind not in ("gpt2", "llama", "gemma4"):
        raise CheckpointError(f"{header.path}: its tokenizer is of the kind {kind!r} (tokenizer.ggml.model); gpt2, "
                              "llama and gemma4 are read. Take the model's safetensors checkpoint")
    special = {name: None if at is None else tokens[at] for name, at in _special_ids(told, kind, len(tokens)).items()}
    if kind == "gpt2":
        backend = _byte_level(header, tokens, merges)
    else:
        backend = _sentencepiece(header, tokens, scores, merges, special["unk_token"])
    _add_whole_tokens(backend, tokens, kinds, kind == "llama" and header.architecture == "phi3")
    adds_bos = told.get("add_bos_token", kind != "gpt2" or told.get("pre") in ADD_BOS)
    return TokenizersBackend(
        tokenizer_object=backend, add_bos_token=bool(adds_bos), add_eos_token=bool(told.get("add_eos_token")),
        chat_template=_templates(header), **special)


def _special_ids(told: dict[str, object], kind: object, count: int) -> dict[str, int | None]:
    """The ids of special tokens; one outside the vocabulary means none."""
    defaults = {"unknown_token_id": 0} | SENTENCEPIECE_IDS if kind == "llama" else {}
    ids = {name: first_id(told.get(key, defaults.get(key))) for name, key in SPECIAL.items()}
    return {name: at if at is not None and 0 <= at < count else None for name, at in ids.items()}


def _templates(header: GgufHeader) -> str | dict[str, str] | None:
    """The template for chats, or all of them by their names where some have one."""
    # a name becomes that of a file
    named = {found[1]: text for key, text in header.metadata.items()
             if isinstance(text, str) and (found := re.fullmatch(rf"{re.escape(TEMPLATE)}\.([\w-]+)", key))}
    default = header.metadata.get(TEMPLATE)
    if not isinstance(default, str):
        return named or None
    return {"default": default} | named if named else default


def _byte_level(header: GgufHeader, tokens: Sequence[str], merges: Sequence[str]) -> Any:
    """BPE over bytes, each spelled as a character."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = header.metadata.get("tokenizer.ggml.pre")
    backend = Tokenizer(models.BPE(
        vocab={token: at for at, token in enumerate(tokens)}, merges=[_pair(merge) for merge in merges],
        ignore_merges=pre in WHOLE_WORDS))
    patterns = split_patterns(pre)
    if patterns is None:
        what = "no pre-tokenizer" if pre is None else f"the pre-tokenizer {pre!r}, which this release does not know"
        warnings.warn(f"{header.path} names {what} (tokenizer.ggml.pre): text is split as GPT-2 does, and may become "
                      "other tokens than the model was trained on; take the tokenizer of the model's safetensors "
                      "checkpoint", stacklevel=5)
    if pre in NFC:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns or ()]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=patterns is None)])
    backend.decoder = decoders.ByteLevel()
    return backend


@one_thread
def _sentencepiece(
    header: GgufHeader, tokens: Sequence[str], scores: Sequence[float], merges: Sequence[str], unknown: str | None,
) -> Any:
    """BPE over characters, unknown ones of which are bytes; a file without merges has what they follow from."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers.tokenization_utils_base import generate_merges

    gemma = header.architecture.startswith("gemma")
    if gemma:  # runs of spaces are stored as such
        tokens = [SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
        scores = [-at for at in range(len(tokens))]  # its merges follow the order of its tokens
    vocab = {token: at for at, token in enumerate(tokens)}
    pairs = [_pair(merge) for merge in merges] or generate_merges(vocab, dict(zip(tokens, scores, strict=True)))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", SPACE)
    prefix = header.metadata.get("tokenizer.ggml.add_space_prefix", not gemma)
    if header.metadata.get("tokenizer.ggml.model") == "gemma4":  # no merge reaches into a run of ends of lines
        backend.pre_tokenizer = pre_tokenizers.Split(Regex("[^\n]+|\n+"), behavior="isolated")
    if not prefix:
        backend.normalizer = spaces
    elif header.architecture == "phi3":  # its tokenizer prepends one even to a text that begins with a space
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([
        decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(),
        *([decoders.Strip(" ", left=1)] if prefix else ())])
    return backend


def _pair(merge: str) -> tuple[str, str]:
    """The two tokens of a merge, between which the first space stands that begins neither."""
    at = merge.find(" ", 1)
    return merge[:at], merge[at + 1:]


def _add_whole_tokens(backend: Any, tokens: Sequence[str], kinds: Sequence[int], strips: bool) -> None:
    """Let tokens of control, and those that a user defined, be found in a text before it is split.

    Args:
        backend: The tokenizer.
        tokens: Its vocabulary as the file has it.
        kinds: The kind of each token.
        strips: Whether control tokens take the spaces after them.
    """
    from tokenizers import AddedToken

    vocab = backend.get_vocab(with_added_tokens=False)
    whole = [(token, CONTROL if token in ENDING_TEXTS else kind) for token, kind in itertools.zip_longest(
        tokens, kinds[:len(tokens)]) if token in vocab]
    kept = ("<unk>", "<s>", "<|endoftext|>")
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True, rstrip=strips and token not in kept)
                                for token, kind in whole if kind == CONTROL])
    backend.add_tokens([AddedToken(token, normalized=False) for token, kind in whole if kind == USER_DEFINED])
