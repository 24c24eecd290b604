"""llama.cpp's own perplexity of a GGUF file, by its C interface, which the library of xllamacpp exports."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Any

import torch


class _Batch(ctypes.Structure):
    """`llama_batch` of llama.h."""

    _fields_ = (("n_tokens", ctypes.c_int32), ("token", ctypes.POINTER(ctypes.c_int32)), ("embd", ctypes.c_void_p),
                ("pos", ctypes.POINTER(ctypes.c_int32)), ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
                ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))), ("logits", ctypes.POINTER(ctypes.c_int8)))


class _Params(ctypes.Structure):
    """Room for `llama_model_params` or `llama_context_params`, which are made and read by llama.cpp alone; a structure
    of this size is passed in memory, as they are. Of a context's the first word is the length."""

    _fields_ = (("words", ctypes.c_uint32 * 512),)


def load_library() -> ctypes.CDLL:
    """The library; ModuleNotFoundError where xllamacpp is not installed."""
    import xllamacpp

    library = ctypes.CDLL(str(next(Path(xllamacpp.__file__).parent.glob("*.so"))))
    for name, result, *arguments in (
        ("model_default_params", _Params), ("context_default_params", _Params),
        ("model_load_from_file", ctypes.c_void_p, ctypes.c_char_p, _Params),
        ("init_from_model", ctypes.c_void_p, ctypes.c_void_p, _Params),
        ("set_n_threads", None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32),
        ("batch_init", _Batch, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32), ("batch_free", None, _Batch),
        ("decode", ctypes.c_int32, ctypes.c_void_p, _Batch), ("get_memory", ctypes.c_void_p, ctypes.c_void_p),
        ("memory_clear", None, ctypes.c_void_p, ctypes.c_bool), ("get_logits", ctypes.c_void_p, ctypes.c_void_p),
        ("free", None, ctypes.c_void_p), ("model_free", None, ctypes.c_void_p),
        ("log_set", None, ctypes.c_void_p, ctypes.c_void_p),
        ("model_get_vocab", ctypes.c_void_p, ctypes.c_void_p), ("vocab_n_tokens", ctypes.c_int32, ctypes.c_void_p),
    ):
        function = getattr(library, f"llama_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def perplexity(path: Path, ids: torch.Tensor, window: int, threads: int) -> float:
    """Perplexity of ids [T] in windows of so many tokens, each predicted from its own start and computed as one prompt.
    """
    library = load_library()
    quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
    library.llama_log_set(ctypes.cast(quiet, ctypes.c_void_p), None)
    library.llama_backend_init()
    params = library.llama_context_default_params()
    params.words[0] = -(-window // 256) * 256
    model = library.llama_model_load_from_file(str(path).encode(), library.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {path}")
    context = library.llama_init_from_model(model, params)
    library.llama_set_n_threads(context, threads, threads)
    vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    batch = library.llama_batch_init(window, 0, 1)
    try:
        loss = sum(_loss(library, context, batch, ids[start : start + window + 1], vocabulary)
                   for start in range(0, ids.numel() - 1, window))
    finally:
        library.llama_batch_free(batch)
        library.llama_free(context)
        library.llama_model_free(model)
    return math.exp(loss / (ids.numel() - 1))


def _loss(library: Any, context: int, batch: Any, part: torch.Tensor, vocabulary: int) -> float:
    """Summed negative log-likelihood of the tokens of part [T] after the first."""
    count = batch.n_tokens = part.numel() - 1
    for i in range(count):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = int(part[i]), i, 1, 1
        batch.seq_id[i][0] = 0
    library.llama_memory_clear(library.llama_get_memory(context), True)
    if library.llama_decode(context, batch):
        raise RuntimeError(f"llama.cpp could not compute {count} tokens")
    found = (ctypes.c_float * (count * vocabulary)).from_address(library.llama_get_logits(context))
    logits = torch.frombuffer(found, dtype=torch.float32).view(count, vocabulary)
    return torch.nn.functional.cross_entropy(logits, part[1:], reduction="sum").item()
