"""Images and videos: what processors give of each, the tokens that stand for it, and the method that embeds it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

TowerFeatures = tuple[torch.Tensor, torch.Tensor]  # embeddings [N, H], and [N, layers H] added after the first layers


@dataclass(frozen=True)
class Modality:
    """One of `MODALITIES`.

    Attributes:
        name: For messages.
        pixels: The argument of `generate` that holds its pixels.
        beside: Arguments that processors give with the pixels.
        token: Attribute of a config with the id of the tokens that stand for it.
        kind: Of its tokens, in `mm_token_type_ids`.
        method: Of the base model, which embeds it.
    """

    name: str
    pixels: str
    beside: tuple[str, ...]
    token: str
    kind: int
    method: str


IMAGES = Modality(
    "images", "pixel_values",
    ("image_sizes", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "image_position_ids",
     "batch_num_images"), "image_token_id", 1, "get_image_features")
VIDEOS = Modality(
    "videos", "pixel_values_videos",
    ("video_grid_thw", "second_per_grid_ts", "video_position_ids", "num_frames_per_video", "image_sizes_videos"),
    "video_token_id", 2, "get_video_features")
MODALITIES = (IMAGES, VIDEOS)
