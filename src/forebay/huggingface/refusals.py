"""Requests of transformers' generation that a planned step cannot serve, each refused in one line."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig
from transformers.generation import GenerationMode

_FETCHED = {GenerationMode.CONTRASTIVE_SEARCH: "contrastive search (penalty_alpha)",
            GenerationMode.DOLA_GENERATION: "DoLa (dola_layers)",
            GenerationMode.GROUP_BEAM_SEARCH: "group beam search (num_beam_groups)",
            GenerationMode.CONSTRAINED_BEAM_SEARCH: "constrained beam search (constraints, force_words_ids)"}


class NoPositionsError(ValueError):
    """The model has no positions for the tokens that a call of `generate` asks for."""


def refuse_generation(config: GenerationConfig, mode: GenerationMode, options: dict[str, Any]) -> None:
    """ValueError for a call of `generate` that cannot be answered, with what to do."""
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name):
            raise ValueError(f"generate: {name} cannot be had, only logits leave a step")
    own = options.get("custom_generate")
    if options.pop("trust_remote_code", None) or isinstance(own, str):
        raise ValueError("generate: Python that a model or a repository brings along is never run; give "
                         "custom_generate as a function")
    if mode in _FETCHED and own is None:
        raise ValueError(f"generate: {_FETCHED[mode]} is Python that transformers fetches from a repository, which is "
                         "never run; give custom_generate as a function")
    if config.guidance_scale not in (None, 1, 1.0):
        raise ValueError("generate: guidance_scale needs a second cache, and the plan has one; leave it out")
    if getattr(config, "prefill_chunk_size", None) and not config.use_cache:
        raise ValueError("generate: prefill_chunk_size cuts a prompt for a cache, and use_cache=False has none; leave "
                         "one of both out")
    for name in ("assistant_early_exit", "use_mtp", "speculation_type"):
        if getattr(config, name, None):
            raise ValueError(f"generate: {name} drafts with parts of the model, of which none runs by itself; leave it "
                             "out, or give a smaller model as assistant_model")
