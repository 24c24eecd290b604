"""The name by which the installed transformers hands a KV cache on: `cache` from 5.24, `past_key_values` before it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from transformers import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from forebay.rewriter.capture.family import RECURRENT_CACHE

CACHE_NAMES = ("cache", "past_key_values")  # that callers may use, whichever release is installed
# The name in `generate`, in `prepare_inputs_for_generation` and in what a forward returns: one in each release.
CACHE_NAME = next((field.name for field in fields(CausalLMOutputWithPast) if "Cache" in str(field.type)), "cache")


def cache_argument(forward: Callable[..., Any]) -> str:
    """Return the name of the argument by which `forward` takes a KV cache."""
    taken = inspect.signature(forward).parameters
    return next((name for name in (CACHE_NAME, *CACHE_NAMES, RECURRENT_CACHE) if name in taken), CACHE_NAME)


def find_cache(arguments: Mapping[str, Any]) -> Any:
    """Return the KV cache among `arguments`, whatever its name; None if there is none."""
    return next((value for value in arguments.values() if isinstance(value, Cache)), None)
