"""Videos with prompts, as transformers' processors give their frames: tokens are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.test_images import ASKED, IMAGE
from multimodal import CONFIGS, save
from selection import ALL

import forebay
from forebay.rewriter.machine.profile import Machine

pytestmark = [pytest.mark.filterwarnings("ignore:.*lies in memory"),
              pytest.mark.filterwarnings("ignore:OpenMP threads spin")]

VIDEO = 151  # id of the token for videos
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
KINDS = (*QWEN, "gemma4", "llava_onevision")
SHOWN = KINDS if ALL else ("qwen3_vl", "llava_onevision")


def video(kind: str, config: Any, frames: int) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Frames as the processor of a kind gives them, and how many tokens each run of its tokens has in a prompt."""
    vision, draw = config.vision_config, torch.Generator().manual_seed(frames)
    if kind in QWEN:
        width = 3 * vision.temporal_patch_size * vision.patch_size**2
        given = dict(pixel_values_videos=torch.randn(frames * 16, width, generator=draw),
                     video_grid_thw=torch.tensor([[frames, 4, 4]]))
        if kind == "qwen2_5_vl":
            given["second_per_grid_ts"] = torch.tensor([0.5])
        # Frames of newer ones are apart, with their times between them.
        return given, [4] * frames if kind.startswith("qwen3") else [4 * frames]
    if kind == "gemma4":
        grid = torch.cartesian_prod(torch.arange(4), torch.arange(2))
        grid = torch.nn.functional.pad(grid, (0, 0, 0, 8), value=-1)
        return dict(pixel_values_videos=torch.randn(frames, 16, 48, generator=draw),
                    video_position_ids=grid.repeat(frames, 1, 1), num_frames_per_video=torch.tensor([frames])), [
                        2] * frames
    return dict(pixel_values_videos=torch.randn(1, frames, 3, 28, 28, generator=draw)), [frames + 1]


def image(kind: str, config: Any) -> tuple[dict[str, torch.Tensor], int]:
    vision, draw = config.vision_config, torch.Generator().manual_seed(9)
    if kind in QWEN:
        width = 3 * vision.temporal_patch_size * vision.patch_size**2
        return dict(pixel_values=torch.randn(16, width, generator=draw), image_grid_thw=torch.tensor([[1, 4, 4]])), 4
    if kind == "gemma4":
        grid = torch.cartesian_prod(torch.arange(4), torch.arange(4))
        return dict(pixel_values=torch.randn(1, 16, 48, generator=draw), image_position_ids=grid[None]), 4
    return dict(pixel_values=torch.randn(1, 3, 3, 28, 28, generator=draw), image_sizes=torch.tensor([[28, 28]])), 0


def prompts(kind: str, rows: list[list[int]], *given: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What a processor gives for rows of ids, padded on the left, and what it made of images and videos."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    asked: dict[str, Any] = dict(input_ids=ids, attention_mask=(ids > 0).long())
    for each in given:
        asked |= {name: torch.cat([asked[name], value]) if name in asked else value for name, value in each.items()}
    if kind in QWEN or kind == "gemma4":
        asked["mm_token_type_ids"] = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    return asked


def spread(runs: list[int]) -> list[int]:
    """Tokens for a video, with a token of text between its runs."""
    found: list[int] = []
    for run in runs:
        found += [*[VIDEO] * run, 8]
    return found


@pytest.mark.parametrize("kind", SHOWN)
def test_tokens_with_videos(kind: str, tmp_path: Path) -> None:
    """One video, two of other lengths side by side, and a video with an image."""
    whole = save(kind, tmp_path, CONFIGS[kind] | {"video_token_id": VIDEO})
    (one, runs), (other, longer) = (video(kind, whole.config, frames) for frames in (2, 3))
    asked = {"one": prompts(kind, [[3, 4, *spread(runs), 9], [11, 12, 13]], one)}
    if kind != "llava_onevision":  # whose videos of a batch have the same number of frames
        asked["two"] = prompts(kind, [[3, *spread(runs), 7], [6, 5, *spread(longer), 2]], one, other)
        seen, count = image(kind, whole.config)
        asked["image"] = prompts(kind, [[5, *[IMAGE] * count, 4, *spread(longer), 3]], other, seen)
    with forebay.wrap(tmp_path, "2MB", batch=2, prompt=28, new_tokens=8, machine=Machine.default()) as lm:
        for name, each in asked.items():
            expected = whole.generate(**each, **ASKED).tolist()
            drawn = each | {"pixel_values_videos": each["pixel_values_videos"].flip(-1)}
            assert whole.generate(**drawn, **ASKED).tolist() != expected, "videos must matter"
            assert lm.generate(**each, **ASKED).tolist() == expected, name


def test_what_cannot_be_taken_is_refused_in_a_line(tmp_path: Path) -> None:
    whole = save("qwen2_5_vl", tmp_path / "qwen", CONFIGS["qwen2_5_vl"] | {"video_token_id": VIDEO})
    given, runs = video("qwen2_5_vl", whole.config, 2)
    asked = prompts("qwen2_5_vl", [[3, *spread(runs)]], given)
    sizes: dict[str, Any] = dict(batch=1, prompt=24, new_tokens=8, machine=Machine.default())
    with forebay.wrap(tmp_path / "qwen", "4MB", **sizes) as lm:
        with pytest.raises(ValueError, match="pixel_values_videos: this model needs video_grid_thw too"):
            lm.generate(asked["input_ids"], pixel_values_videos=given["pixel_values_videos"], **ASKED)
        with pytest.raises(ValueError, match=r"have 0 tokens for videos \(id 151\), and the videos make 8 embeddings"):
            lm.generate(**asked | {"input_ids": asked["input_ids"].clamp(max=9)}, **ASKED)
    save("internvl", tmp_path / "intern")
    with forebay.wrap(tmp_path / "intern", "4MB", **sizes) as lm, (
            pytest.raises(ValueError, match="a model of type 'internvl' takes no pixel_values_videos")):
        lm.generate(torch.tensor([[3, 4]]), pixel_values_videos=torch.zeros(1, 3, 28, 28), **ASKED)
