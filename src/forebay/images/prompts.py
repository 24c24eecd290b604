"""Images among the arguments of `generate`, as transformers' processors give them, in the prompts of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from forebay.call_turns import ModelCall
from forebay.huggingface.inputs import Prompts
from forebay.rewriter.checkpoints.text_model import MULTIMODAL
from forebay.runtime.run.step_inputs import PromptFeatures
from forebay.step_model import StepModel

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from forebay.images.tower import ImageTower

PIXELS = "pixel_values"
# What processors give with pixels.
BESIDE = ("image_sizes", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "token_type_ids",
          "image_position_ids", "batch_num_images")
OTHERS = {"pixel_values_videos": "videos", "input_features": "recordings"}
TYPES = "mm_token_type_ids"


def take_image_inputs(options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What a processor made of images, taken out of the arguments of a call; nothing where there are none. Then types
    of tokens that are all text go, and other arguments stay, for others to take or refuse. ValueError for videos and
    sounds."""
    for name, kind in OTHERS.items():
        if options.get(name) is not None:
            raise ValueError(f"{name}: {kind} are not taken; give text and images")
    if options.get(PIXELS) is None:
        types = options.get(TYPES)
        if types is not None and not torch.as_tensor(types).any():
            options.pop(TYPES)
        return {}
    given = {name: options.pop(name, None) for name in (PIXELS, TYPES, *BESIDE)}
    return {name: value for name, value in given.items() if value is not None}


def see_images(
    lm: StepModel, call: ModelCall, prompts: Prompts, images: Mapping[str, torch.Tensor], continued: bool = False
) -> Prompts:
    """Put the embeddings of images where prompts have tokens for them.

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
    if continued:
        raise ValueError(f"{PIXELS}: images are taken with whole prompts alone; leave past_key_values out")
    if prompts.embeds is not None:
        raise ValueError(f"{PIXELS}: give images or inputs_embeds, not both")
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
    given: tuple[torch.Tensor, torch.Tensor],
) -> Prompts:
    """Prompts with what the tower gives of images at their tokens."""
    embeds, added = given
    token = config.image_token_id
    placed = (prompts.ids == token) & prompts.mask
    if int(placed.sum()) != len(embeds):
        raise ValueError(f"{PIXELS}: the prompts have {int(placed.sum())} tokens for images (id {token}), and the "
                         f"images make {len(embeds)} embeddings: give all that the processor makes of text and images")
    features = {"inputs_embeds": _at(placed, embeds)}
    if added.shape[1]:
        features["deepstack"] = _at(placed, added)
    if hasattr(tower.base, "get_rope_index"):
        positions, _ = tower.base.get_rope_index(
            prompts.ids, mm_token_type_ids=placed.int(), attention_mask=prompts.mask.long(),
            image_grid_thw=torch.as_tensor(images["image_grid_thw"]))
        features["positions"] = positions.permute(1, 2, 0)
    known = MULTIMODAL[config.model_type]
    if known.group_layers(config):
        features["until"] = _lengths(prompts.mask) if known.whole else _ends(placed, prompts.mask)
        _require_within(features["until"], prompts.mask, getattr(config.get_text_config(), "sliding_window", None))
    return replace(prompts, features=features, placed=placed)


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
        raise ValueError(f"{PIXELS}: an image of {longest} tokens is longer than the model's window of {window}; give "
                         "images apart from each other, or smaller ones")


def _at(placed: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[B, T, W] with rows [N, W] where `placed` [B, T] is true, and zeros elsewhere."""
    found = rows.new_zeros(*placed.shape, rows.shape[1])
    found[placed] = rows
    return found
