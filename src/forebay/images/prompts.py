"""Images and videos among the arguments of `generate`, as transformers' processors give them, in a call's prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from forebay.call_turns import ModelCall
from forebay.huggingface.inputs import Prompts
from forebay.images.modalities import MODALITIES, Modality, TowerFeatures
from forebay.rewriter.checkpoints.text_model import MULTIMODAL
from forebay.runtime.run.step_inputs import PromptFeatures
from forebay.step_model import StepModel

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from forebay.images.tower import ImageTower

# Sizes by which positions in three dimensions are made.
POSITIONED = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
TYPES = ("mm_token_type_ids", "token_type_ids")
SOUNDS = ("input_features", "audio_input_features", "input_audio_embeds")  # Phi-4-multimodal's are the last two
OTHER_PIXELS = "image_pixel_values"  # Phi-4-multimodal's


def take_image_inputs(options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Take a processor's inputs for images and videos out of the arguments of a call; nothing where there are none.
    Then types of tokens that are all text go, and other arguments stay, for others to take or refuse. ValueError for
    audio, and for images that no model here takes."""
    for name in SOUNDS:
        if options.get(name) is not None:
            raise ValueError(f"{name}: audio is not taken; give text, images or videos")
    if options.get(OTHER_PIXELS) is not None:
        raise ValueError(f"{OTHER_PIXELS}: images of this kind of model are not taken; give text alone")
    seen = [each for each in MODALITIES if options.get(each.pixels) is not None]
    if not seen:
        types = options.get(TYPES[0])
        if types is not None and not torch.as_tensor(types).any():
            options.pop(TYPES[0])
        return {}
    names = [*TYPES, *(name for each in seen for name in (each.pixels, *each.beside))]
    given = {name: options.pop(name, None) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def see_images(
    lm: StepModel, call: ModelCall, prompts: Prompts, images: Mapping[str, torch.Tensor], continued: bool = False
) -> Prompts:
    """Put the embeddings of images and videos where prompts have tokens for them.

    Args:
        lm: The model.
        call: The call that has the prompts.
        prompts: Whose ids have as many image tokens as the images make.
        images: What `take_image_inputs` took.
        continued: Whether a cache holds the first tokens of the prompts.

    Raises:
        ValueError: The model takes no images, or others than these.
        PlanError: The budget has no room for the tower, or for so many images.
    """
    pixels = next(each.pixels for each in MODALITIES if each.pixels in images)
    if continued:
        raise ValueError(f"{pixels}: images are taken with whole prompts alone; leave past_key_values out")
    if prompts.embeds is not None:
        raise ValueError(f"{pixels}: give images or inputs_embeds, not both")
    tower, given = lm.tower, lm.image_features(images, call)
    return _placed(lm.config, tower, prompts, images, given)


def prompt_features(
    lm: StepModel, ids: Sequence[int], images: Mapping[str, torch.Tensor], budget_nbytes: int
) -> PromptFeatures:
    """Compute what stands for the image tokens of one prompt, in memory beside that of steps.

    Args:
        lm: The model.
        ids: The prompt.
        images: What the model's processor made of its images.
        budget_nbytes: For the tower.

    Raises:
        ValueError: The model takes no images, or others than these.
        PlanError: The budget has no room for the tower, or for so many images.
    """
    row = torch.tensor([list(ids)])
    tower, prompts = lm.tower, Prompts(row, torch.ones_like(row, dtype=torch.bool))
    given = _placed(lm.config, tower, prompts, images, tower.features(images, budget_nbytes))
    assert given.placed is not None
    return PromptFeatures(given.placed[0], {name: value[0] for name, value in given.features.items()})


def _placed(
    config: PreTrainedConfig, tower: ImageTower, prompts: Prompts, images: Mapping[str, torch.Tensor],
    given: Mapping[Modality, TowerFeatures],
) -> Prompts:
    """Prompts with what the tower gives of images and videos at their tokens."""
    kinds = torch.zeros_like(prompts.ids, dtype=torch.int32)
    features: dict[str, torch.Tensor] = {}
    for modality, (embeds, added) in given.items():
        placed = _tokens(config, modality, prompts, len(embeds))
        kinds += placed * modality.kind
        for name, rows in (("inputs_embeds", embeds), ("deepstack", added)):
            if rows.shape[1]:
                features[name] = features.get(name, 0) + _at(placed, rows)
    placed = kinds > 0
    if hasattr(tower.base, "get_rope_index"):
        sizes = {name: torch.as_tensor(images[name]) for name in POSITIONED if name in images}
        positions, _ = tower.base.get_rope_index(
            prompts.ids, mm_token_type_ids=kinds, attention_mask=prompts.mask.long(), **sizes)
        features["positions"] = positions.permute(1, 2, 0)
    known = MULTIMODAL[config.model_type]
    if known.group_layers(config):
        features["until"] = _lengths(prompts.mask) if known.whole else _ends(placed, prompts.mask)
        _require_within(features["until"], prompts.mask, getattr(config.get_text_config(), "sliding_window", None))
    return replace(prompts, features=features, placed=placed)


def _tokens(config: PreTrainedConfig, modality: Modality, prompts: Prompts, count: int) -> torch.Tensor:
    """[B, T] where prompts have tokens for a modality; ValueError where they are not as many as its embeddings."""
    token = getattr(config, modality.token)
    placed = (prompts.ids == token) & prompts.mask
    if int(placed.sum()) != count:
        raise ValueError(f"{modality.pixels}: the prompts have {int(placed.sum())} tokens for {modality.name} (id "
                         f"{token}), and the {modality.name} make {count} embeddings: give all that the processor "
                         f"makes of text and {modality.name}")
    return placed


def _ends(placed: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B, T] where the tokens end that each token sees, counted without padding: at the end of an image, or itself."""
    found = mask.cumsum(1)
    for row, here in zip(found, placed, strict=True):
        for column in range(len(row) - 2, -1, -1):
            if here[column] and here[column + 1]:
                row[column] = row[column + 1]
    return found


def _lengths(mask: torch.Tensor) -> torch.Tensor:
    """[B, T] the number of tokens of each prompt."""
    return mask.sum(1, keepdim=True).expand(mask.shape)


def _require_within(until: torch.Tensor, mask: torch.Tensor, window: int | None) -> None:
    """ValueError for an image that sees itself beyond a window, which attention here does not reach over."""
    longest = int((until - mask.cumsum(1)).max()) + 1
    if window and longest > window:
        raise ValueError(f"pixel_values: an image of {longest} tokens is longer than the model's window of {window}; "
                         "give images apart from each other, or smaller ones")


def _at(placed: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[B, T, W] with rows [N, W] where `placed` [B, T] is true, and zeros elsewhere."""
    found = rows.new_zeros(*placed.shape, rows.shape[1])
    found[placed] = rows
    return found
