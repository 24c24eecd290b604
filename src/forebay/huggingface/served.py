"""The part of a generation config that the runtime's own loop serves; read without transformers."""

from __future__ import annotations

import json
from pathlib import Path

from forebay.rewriter.ir.files import read_input

# what the loop of `generate_tokens` serves by itself, or what changes no token
SERVED = {"max_length", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "eos_token_id", "pad_token_id",
          "bos_token_id", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size",
          "disable_compile", "compile_config", "transformers_version"}


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
