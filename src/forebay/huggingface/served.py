"""The part of a generation config that the runtime's own loop serves; read without transformers."""

from __future__ import annotations

import json
from pathlib import Path

from forebay.rewriter.ir.files import read_input

# what the loop of `generate_tokens` serves by itself, or what changes no token
SERVED = {"max_length", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "eos_token_id", "pad_token_id",
          "bos_token_id", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size",
          "disable_compile", "compile_config", "transformers_version"}


NUMBERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # that say how tokens are drawn


def named_sampling(folder: Path) -> dict[str, float] | None:
    """Read how the generation_config.json in a model's folder has tokens drawn; None where there is none, or where
    transformers has to read it."""
    try:
        asked = json.loads(read_input(folder / "generation_config.json"))
        named = {name: asked[name] for name in NUMBERS if asked.get(name) is not None}
    except (OSError, ValueError, RecursionError, AttributeError, TypeError):
        return None
    return named if all(type(each) in (int, float) for each in named.values()) else None


def asks_nothing_more(folder: Path) -> bool:
    """Return whether the generation_config.json in a model's folder asks for nothing that the loop does not do; False
    where there is none, or none that can be read."""
    try:
        asked = json.loads(read_input(folder / "generation_config.json"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(asked, dict) and all(
        name in SERVED or name.startswith("_") or value is None or value is (name == "use_cache")
        for name, value in asked.items())
