"""Whether a model takes images, and the tower that does."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.rewriter.checkpoints.checkpoint import Checkpoint
from forebay.rewriter.checkpoints.config import read_config
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.checkpoints.text_model import MULTIMODAL
from forebay.rewriter.ir.files import read_input
from forebay.rewriter.ir.graph import CapturedModel
from forebay.rewriter.ir.plan import PlanError
from forebay.rewriter.one_thread import one_thread
from forebay.rewriter.planning.options import Options

LOG = logging.getLogger("forebay")

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from forebay.images.tower import ImageTower
    from forebay.runtime.devices.kind import DeviceKind


def open_tower(
    config: PreTrainedConfig, checkpoint: Checkpoint, captured: CapturedModel, options: Options, kind: DeviceKind
) -> ImageTower:
    """Open the vision tower of a model's folder.

    Raises:
        CheckpointError: The model takes no images.
        PlanError: It takes text alone on several ranks, or on a device of that kind.
    """
    if options.mesh is not None:
        raise PlanError("images: a model on several ranks takes text alone; leave mesh out")
    known = MULTIMODAL.get(config.model_type)
    if known is None or not known.images:
        taken = ", ".join(sorted(kind for kind, each in MULTIMODAL.items() if each.images))
        raise CheckpointError(f"{text_alone(config.model_type)}; images are taken by {taken}")
    if known.group_layers(config) and not kind.on_host_cores:
        raise PlanError(f"images: tokens of an image see each other in a model of type {config.model_type!r}, which "
                        "is computed on the CPU alone (CUDA_VISIBLE_DEVICES= leaves the GPU out)")
    from forebay.images.tower import ImageTower

    return ImageTower(config, checkpoint, captured.dtype)


@one_thread
def text_alone(kind: str, media: str = "images") -> str:
    """Return why models of a kind take no images, or no other `media`."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )

    if kind not in MULTIMODAL and (kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
                                   or kind in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES):
        return f"{media}: models of type {kind!r} are not supported"
    why = ", because its vision tower is a MobileNet of timm" if kind == "gemma3n" else ""
    return f"{media}: a model of type {kind!r} takes text alone here{why}"


def takes_images(folder: Path) -> bool:
    """Return whether the model of a folder is of a kind that takes images, by its config alone."""
    known = MULTIMODAL.get(model_type(folder))
    return known is not None and known.images


def model_type(folder: Path) -> str:
    """Return the model type in a folder's config; "" where there is none."""
    try:
        return str(json.loads(read_input(folder / "config.json"))["model_type"])
    except (OSError, ValueError, KeyError, TypeError):  # whoever opens the folder says what is wrong
        return ""


def image_options(options: Options, captured: CapturedModel, prompt: int) -> Options:
    """Return the options for steps over prompts with images, of at most so many tokens: where tokens of an image see
    each other, each prompt is one chunk, so that no step breaks off within an image."""
    if not captured.image_groups or (options.prefill_chunk or 0) >= prompt:
        return options
    if options.prefill_chunk and not options.chunk_of_images:
        LOG.warning("prefill_chunk: steps over prompts with images take %d tokens, not %d, because tokens of an image "
                    "see each other", prompt, options.prefill_chunk)
    return replace(options, prefill_chunk=prompt, chunk_of_images=True)


def image_chunk(config: PreTrainedConfig, prompt: int) -> int:
    """Return how many tokens a step needs at least where tokens of an image see each other: two images, or the whole
    prompt."""
    tokens = getattr(config, "mm_tokens_per_image", None)
    return prompt if tokens is None or MULTIMODAL[config.model_type].whole else 2 * tokens


def image_lines(
    checkpoint: Checkpoint, captured: CapturedModel, options: Options, kind: DeviceKind
) -> list[str]:
    """Return a plan's lines on images: one for a model that takes images, else none."""
    if not takes_images(checkpoint.folder):  # without loading transformers
        return []
    try:
        tower = open_tower(read_config(checkpoint.folder), checkpoint, captured, options, kind)
    except (OSError, ValueError, KeyError, TypeError):  # of a folder that has no tower, or options that leave it out
        return []
    return [f"images      {tower.summary}"]
