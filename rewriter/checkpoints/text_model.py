"""The language model within a multimodal one, which runs on text alone: its config, and its names in the checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

from forebay.rewriter.one_thread import one_thread

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

BASE, HEAD = "model", "lm_head."  # of every causal model below
OTHERS = "beside the language model: "  # before names of towers and projectors, which text has no use for
LANGUAGE, TEXT, CAUSAL = "model.language_model", "model.text_model", "language_model.model"
# By model type, where the language model lies in the whole one. Without images each of these is the causal model of its
# own config. Others see a text in both directions (PaliGemma), or have positions in three dimensions (Qwen2-VL and its
# relatives).
TEXT_ALONE = {
    "aya_vision": LANGUAGE, "cohere2_vision": LANGUAGE, "gemma3": LANGUAGE, "gemma3n": LANGUAGE, "gemma4": LANGUAGE,
    "idefics3": TEXT, "internvl": LANGUAGE, "lfm2_vl": LANGUAGE, "llama4": CAUSAL, "llava": LANGUAGE,
    "llava_next": LANGUAGE, "llava_onevision": LANGUAGE, "mistral3": LANGUAGE, "qwen3_5": LANGUAGE,
    "qwen3_5_moe": LANGUAGE, "smolvlm": TEXT, "vipllava": LANGUAGE}


@one_thread
def text_config(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """Return the config of the language model within a multimodal one; None for any other config."""
    if config.model_type not in TEXT_ALONE:
        return None
    text = copy.deepcopy(config.get_text_config(decoder=True))
    # The whole model ties its head by its own setting, which some configs repeat for the language model.
    text.tie_word_embeddings = bool(getattr(config, "tie_word_embeddings", text.tie_word_embeddings))
    return text


def text_names(config: PreTrainedConfig, prefix: str, rename: Callable[[str], str]) -> tuple[str, Callable[[str], str]]:
    """Return the base model's prefix and the renaming of checkpoint names, for the language model alone.

    Args:
        config: The multimodal model's.
        prefix: The base model's prefix of the whole model.
        rename: Gives the whole model's name of a checkpoint's name.
    """
    path = TEXT_ALONE[config.model_type]
    starts = (f"{path}.", f"{path.removeprefix(f'{prefix}.')}.")
    head = f"{path.rpartition('.')[0]}.{HEAD}"  # of a whole causal model within

    def of_text(name: str) -> str:
        renamed = rename(name)
        start = next((each for each in starts if renamed.startswith(each)), None)
        if start is not None:
            return f"{BASE}.{renamed[len(start):]}"
        if renamed.startswith((HEAD, head)):
            return f"{HEAD}{renamed.rpartition(HEAD)[2]}"
        return f"{OTHERS}{renamed}"

    return BASE, of_text
