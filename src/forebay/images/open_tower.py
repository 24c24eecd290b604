"""Whether a model takes images, and the tower that does."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from forebay.rewriter.checkpoints.checkpoint import Checkpoint
from forebay.rewriter.checkpoints.config import read_config
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.checkpoints.text_model import MULTIMODAL
from forebay.rewriter.ir.files import read_input
from forebay.rewriter.ir.graph import CapturedModel
from forebay.rewriter.planning.options import Options

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from forebay.images.tower import ImageTower


def open_tower(
    config: PreTrainedConfig, checkpoint: Checkpoint, captured: CapturedModel, options: Options, kernels: str
) -> ImageTower:
    """Open the vision tower of a model's folder; ValueError for one that takes no images, or text alone,
    with the kernels of that kind."""
    if options.mesh is not None:
        raise ValueError("images: a model on several ranks takes text alone; leave mesh out")
    known = MULTIMODAL.get(config.model_type)
    if known is None or not known.images:
        taken = ", ".join(sorted(kind for kind, each in MULTIMODAL.items() if each.images))
        raise ValueError(f"images: a model of type {config.model_type!r} takes text alone here; images are taken by "
                         f"{taken}")
    if known.groups and kernels != "cpu":
        raise ValueError(f"images: tokens of an image see each other in a model of type {config.model_type!r}, which "
                         "is computed on the CPU alone (CUDA_VISIBLE_DEVICES= leaves the GPU out)")
    from forebay.images.tower import ImageTower

    return ImageTower(config, checkpoint, captured.dtype)


def image_lines(
    checkpoint: Checkpoint, captured: CapturedModel, options: Options, kernels: str
) -> list[str]:
    """What a plan says of images: a line for a folder of a model that takes any, else none."""
    try:
        settings = json.loads(read_input(checkpoint.folder / "config.json"))
        if settings["model_type"] not in MULTIMODAL:  # without loading transformers
            return []
        tower = open_tower(read_config(checkpoint.folder), checkpoint, captured, options, kernels)
    except (OSError, ValueError, KeyError, TypeError, CheckpointError):  # of a model, or a folder, that has no tower
        return []
    return [f"images      {tower.plan}"]
