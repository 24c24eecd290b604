"""The language model within a multimodal one, which runs on text alone: its config, and its names in the checkpoint."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from forebay.rewriter.one_thread import one_thread

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

BASE, HEAD = "model", "lm_head."  # of every causal model below
OTHERS = "beside the language model: "  # before names of towers and projectors, which text has no use for
LANGUAGE, TEXT, CAUSAL = "model.language_model", "model.text_model", "language_model.model"
DEEPSTACK = "deepstack_layers"  # of a text config: layers after which features of images are added
GROUPS = "image_groups"  # of a text config: kinds of layers in which tokens of an image see each other
PLACEHOLDER = "image_placeholder"  # of a text config: the id that tables by ids are asked for at tokens of images
# Settings by which a causal model changes its logits, and values that change nothing: heads of multimodal ones do not.
PLAIN_HEAD = {"logit_scale": 1.0, "logits_scaling": 1.0, "lm_head_multiplier": 1.0}
CAP = "final_logit_softcapping"
OF_PARTS = {"text_config", "vision_config", "audio_config"}
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Multimodal:
    """Facts about one kind of multimodal model.

    Attributes:
        text: Where the language model lies in the whole one.
        images: Whether images are taken: the features that the model's `get_image_features` gives are all that a step
            must know of them.
        groups: Kinds of layers in which tokens of an image see each other.
        asked: Value of the text config's `use_bidirectional_attention` without which they do not, if any.
        whole: Whether all tokens of a prompt with images see each other.
        projector: Module that `get_image_features` leaves to the model, if any.
        capped: Whether logits are capped as the text config says.
    """

    text: str
    images: bool = False
    groups: tuple[str, ...] = ()
    asked: str = ""
    whole: bool = False
    projector: str = ""
    capped: bool = False

    def group_layers(self, config: PreTrainedConfig) -> tuple[str, ...]:
        """Return the `groups` of a model of this config."""
        setting = getattr(config.get_text_config(), "use_bidirectional_attention", None)
        return self.groups if self.asked in ("", setting) else ()


# By model type. Without images each of these is the causal model of its own config; the positions of Qwen2-VL and its
# relatives have three dimensions, which are equal then. PaliGemma sees a prompt of text alone as a causal model.
MULTIMODAL = {
    **dict.fromkeys(("aya_vision", "cohere2_vision", "internvl", "lfm2_vl", "llava", "llava_next", "llava_onevision",
                     "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe",
                     "vipllava"),
                    Multimodal(LANGUAGE, images=True)),
    "gemma3": Multimodal(LANGUAGE, images=True, groups=(FULL, SLIDING)),
    **dict.fromkeys(("qwen2_audio", "voxtral"), Multimodal(LANGUAGE)),
    "gemma3n": Multimodal(LANGUAGE, capped=True),
    "gemma4": Multimodal(LANGUAGE, images=True, groups=(SLIDING,), asked="vision", capped=True),
    "paligemma": Multimodal(LANGUAGE, images=True, groups=(FULL, SLIDING), whole=True, capped=True),
    **dict.fromkeys(("idefics3", "smolvlm"), Multimodal(TEXT, images=True)),
    "llama4": Multimodal(CAUSAL, images=True, projector="multi_modal_projector")}


@one_thread
def text_config(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """Return the config of the language model within a multimodal one; None for any other config."""
    if config.model_type not in MULTIMODAL:
        return None
    text = copy.deepcopy(config.get_text_config(decoder=True))
    # The whole model ties its head by its own setting, which some configs repeat for the language model.
    ties = (getattr(each, "tie_word_embeddings", None) for each in (config, text))
    known = MULTIMODAL[config.model_type]
    for name, value in {**PLAIN_HEAD, **({} if known.capped else {CAP: None})}.items():
        if getattr(text, name, None) is not None:
            setattr(text, name, value)
    if groups := known.group_layers(config):
        setattr(text, GROUPS, groups)
    if known.whole:  # what sees what is then given with each prompt
        text.use_bidirectional_attention = None
    if getattr(text, "hidden_size_per_layer_input", None):
        setattr(text, PLACEHOLDER, text.pad_token_id or 0)
    if features := getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None):
        setattr(text, DEEPSTACK, len(features))
    text.tie_word_embeddings = bool(next((tie for tie in ties if tie is not None), False))
    return text


@one_thread
def causal_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class of causal language models of a config; None where there is none, or images belong to it.

    transformers has none for the language models of Qwen2-VL and its relatives: theirs is made of the base model.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    if is_unsupported_multimodal(config):
        return None
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    whole = config.model_type.removesuffix("_text")
    return _with_head(MODEL_MAPPING[type(config)]) if found is None and whole in MULTIMODAL and (
        type(config) in MODEL_MAPPING) else found


def not_causal(config: PreTrainedConfig) -> str:
    """Say that there is no causal language model of a config, and which are supported instead."""
    found = f"{config.model_type!r} is not a causal language model that transformers knows"
    if getattr(config, "is_encoder_decoder", False):
        return f"{found}; forebay.wrap and forebay run take encoder-decoders of text or speech with their encoder"
    if is_unsupported_multimodal(config):
        return (f"models of type {config.model_type!r} are not supported; of multimodal models these are: "
                f"{', '.join(sorted(MULTIMODAL))}")
    return found


def is_unsupported_multimodal(config: PreTrainedConfig) -> bool:
    """Return whether a config is of a multimodal model whose language model is not known here."""
    return config.model_type not in MULTIMODAL and not OF_PARTS.isdisjoint(getattr(config, "sub_configs", None) or ())


@functools.cache
@one_thread
def _with_head(base: Any) -> type[PreTrainedModel]:
    """Make the class of causal language models of a base model's."""
    from transformers import GenerationMixin
    from transformers.modeling_outputs import CausalLMOutputWithPast

    class TextWithHead(base.__base__, GenerationMixin):  # type: ignore[misc]
        _tied_weights_keys: ClassVar = {f"{HEAD}weight": f"{BASE}.embed_tokens.weight"}

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = base(config)
            if hasattr(self.model, "_deepstack_process"):
                vars(self.model)["_deepstack_process"] = _add_features
            self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, **given: Any) -> Any:
            hidden = self.model(input_ids=input_ids, position_ids=position_ids, **given).last_hidden_state
            return CausalLMOutputWithPast(logits=self.lm_head(hidden))

    TextWithHead.__name__ = TextWithHead.__qualname__ = f"{base.__name__}WithHead"
    return TextWithHead


def _add_features(hidden: torch.Tensor, of_images: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Hidden states [B, S, H] with features [B, S, H] added at the tokens of images, `of_images` [B, S]."""
    return hidden + torch.where(of_images[..., None], features, 0)


@one_thread
def text_module(model: Any) -> Any:
    """Return the language model within a multimodal one in memory, as a causal model of its parameters; any other
    model itself."""
    if getattr(getattr(model, "config", None), "model_type", None) not in MULTIMODAL or (
            model.get_output_embeddings() is None):
        return model
    text: Any = text_config(model.config)
    cls: Any = causal_class(text)
    with torch.device("meta"):
        alone = cls(text)
    setattr(alone, BASE, model.get_submodule(MULTIMODAL[model.config.model_type].text))
    alone.set_output_embeddings(model.get_output_embeddings())
    return alone


def text_names(config: PreTrainedConfig, prefix: str, rename: Callable[[str], str]) -> tuple[str, Callable[[str], str]]:
    """Return the base model's prefix and the renaming of checkpoint names, for the language model alone.

    Args:
        config: The multimodal model's.
        prefix: The base model's prefix of the whole model.
        rename: Gives the whole model's name of a checkpoint's name.
    """
    path = MULTIMODAL[config.model_type].text
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
