"""A tiny Qwen2.5-VL with a small processor of its own, and films for it: transformers' needs torchvision."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as T
from multimodal import CONFIGS, save
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.processing_utils import VideosKwargs
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

Image = pytest.importorskip("PIL.Image")
TEMPLATE = """{% for m in messages %}{{ m.role }} : {% if m.content is string %}{{ m.content }}{% else %}\
{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% else %}<{{ p.type }}> {% endif %}{% endfor %}\
{% endif %} {% endfor %}assistant :"""
IMAGE, VIDEO, RATE = 150, 151, 4.0


class SmallProcessor:
    """Does with images and videos as Qwen2.5-VL's, in squares of 56 pixels: `RATE` frames per second are seen."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.image_processor = tokenizer, object()
        self.video_processor = SimpleNamespace(valid_kwargs=VideosKwargs, fps=RATE, do_sample_frames=True)
        self.video_processor.sample_frames = lambda metadata, num_frames=None, fps=None, **_: default_sample_indices_fn(
            metadata, num_frames, fps)

    def __call__(self, text: list[str], images: Any = None, videos: Any = None, video_metadata: Any = None,
                 do_sample_frames: bool = True, **_: Any) -> dict[str, Any]:
        given: dict[str, Any] = {}
        counts: dict[str, list[int]] = {"<image>": [], "<video>": []}
        if images:
            parts = [patches(np.stack([np.asarray(each)] * 2)) for each in images]
            given = {"pixel_values": torch.cat(parts), "image_grid_thw": torch.tensor([[1, 4, 4]] * len(parts))}
            counts["<image>"] = [4] * len(parts)
        if videos:
            found, grids, seconds = [], [], []
            for frames, facts in zip(videos, video_metadata, strict=True):
                facts = VideoMetadata(**facts)
                if do_sample_frames:
                    facts.frames_indices = self.video_processor.sample_frames(facts, fps=RATE)
                    frames = frames[facts.frames_indices]
                found.append(patches(frames))
                grids.append([len(frames) // 2, 4, 4])
                seconds.append(2 / facts.sampled_fps)
                counts["<video>"].append(len(frames) // 2 * 4)
            given |= {"pixel_values_videos": torch.cat(found), "video_grid_thw": torch.tensor(grids),
                      "second_per_grid_ts": torch.tensor(seconds)}
        left = {token: iter(each) for token, each in counts.items()}
        words = itertools.chain(*([w] * (next(left[w]) if w in left else 1) for w in text[0].split()))
        ids = torch.tensor([self.tokenizer.convert_tokens_to_ids([*words])])
        kinds = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
        return given | {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds}


def patches(frames: np.ndarray) -> torch.Tensor:
    """[T / 2 * 16, 1176] of frames [T, H, W, 3]; some order of pixels."""
    small = np.stack([np.asarray(Image.fromarray(each).resize((56, 56))) for each in frames]) / 255 - 0.5
    return torch.from_numpy(small).float().reshape(len(frames) // 2 * 16, -1)


def qwen(folder: Path) -> tuple[Any, SmallProcessor]:
    """A folder of a model with its tokenizer; the model and a processor."""
    plain = CONFIGS["qwen2_5_vl"]
    whole = save("qwen2_5_vl", folder, plain | {"video_token_id": VIDEO, "text_config": plain["text_config"] | {
        "max_position_embeddings": 600}})
    whole.generation_config.eos_token_id = whole.generation_config.pad_token_id = 2
    whole.generation_config.save_pretrained(folder)
    tokenizer = word_tokenizer(["user", "assistant", ":", *(f"w{i}" for i in range(6, 150)), "<image>", "<video>"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return whole, SmallProcessor(tokenizer)


def word_tokenizer(words: list[str]) -> Any:
    """A tokenizer of whole words."""
    words, special = ["<pad>", "<unk>", "</s>", *words], [word for word in words if word.startswith("<")]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return T.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", eos_token="</s>",
                                     additional_special_tokens=special)


def film(seed: int, frames: int = 8) -> np.ndarray:
    """[T, 30, 40, 3] of a few colors, which GIF keeps."""
    draw = np.random.default_rng(seed)
    return draw.integers(0, 2, (frames, 30, 40, 3), np.uint8) * np.uint8(255)


def gif(path: Path, frames: np.ndarray, shown_ms: int = 50) -> Path:
    first, *others = (Image.fromarray(each) for each in frames)
    first.save(path, save_all=True, append_images=others, duration=shown_ms)
    return path


def answer(whole: Any, processor: SmallProcessor, text: str, *films: np.ndarray, fps: float = 20, **given: Any) -> str:
    """transformers' answer to films as they are whole."""
    facts = [dict(total_num_frames=len(each), fps=fps, frames_indices=[*range(len(each))]) for each in films]
    asked = processor(text=[text], videos=films, video_metadata=facts, **given)
    out = whole.generate(**asked, max_new_tokens=5, do_sample=False)[0, asked["input_ids"].shape[1]:]
    return processor.tokenizer.decode(out, skip_special_tokens=True).strip()
