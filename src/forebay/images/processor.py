"""A model's own processor of text, images and videos, which are files or data URLs, and never fetched from the
network."""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np
import torch

from forebay.commands.chat_template import ChatTemplate
from forebay.commands.prompts import BadPrompt
from forebay.commands.terminal import JobError
from forebay.commands.tokenizer_bounds import check_folder
from forebay.rewriter.checkpoints.config import LOCAL_ONLY, require_regular_files
from forebay.rewriter.ir.files import read_input
from forebay.rewriter.one_thread import one_thread

FILE = "file://"
MOST_SCHEME = 12  # characters of a URL in which "://" follows the name of a protocol
MOST_SHOWN = 256  # characters of a source in a message
PART_NBYTES = 1 << 16  # of a percent-encoded text
MOST_PIXELS = 1 << 26  # of an image, which may take 3 bytes each in memory


@dataclass(frozen=True)
class Video:
    """Frames of a video that a model sees.

    Attributes:
        frames: [T, H, W, 3] uint8.
        facts: As transformers' `VideoMetadata`: frames and frames per second of the whole video, and which these are.
    """

    frames: np.ndarray
    facts: dict[str, Any]


@one_thread
def load_processor(folder: Path) -> Any:
    """The folder's own processor of text and images; JobError where there is none that works."""
    from transformers import AutoProcessor

    try:
        require_regular_files(folder)
        check_folder(folder)
        processor = AutoProcessor.from_pretrained(folder, **LOCAL_ONLY)
    except ImportError as error:
        raise JobError(f"the image processor of {folder} needs other packages: pip install torchvision pillow "
                       f"({' '.join(str(error).split())[:120]})") from error
    except Exception as error:  # each processor checks its settings in its own way
        raise JobError(f"{folder} holds no usable processor of images: {' '.join(str(error).split())[:200]}") from error
    if getattr(processor, "image_processor", None) is None:
        raise JobError(f"{folder} holds no processor of images (preprocessor_config.json)")
    return processor


def open_image(source: str, files: bool = True) -> Any:
    """The image, in RGB, of a data URL or, with `files`, of a file; BadPrompt, with the name or the URL's beginning,
    for anything else."""
    with opening("image", source, files) as read:
        image = pillow_image(read(), f"image {shown(source)}")
        return _upright(image)


def shown(source: str) -> str:
    """A file's name, shortened where it is long or a data URL."""
    most = 40 if is_data(source) else MOST_SHOWN
    return f"{source[:most]}…" if len(source) > most else source


def is_data(source: str) -> bool:
    """Return whether a source is a data URL."""
    return source[:5].lower() == "data:"


@contextmanager
def opening(what: str, source: str, files: bool) -> Iterator[Callable[[], bytes]]:
    """Give the function that reads the source of an image or a video; BadPrompt for one that may not be read, and for
    errors of decoders, each of which fails in its own way."""
    name = f"{what} {shown(source)}"
    if "://" in source[:MOST_SCHEME] and not is_data(source) and not source.startswith(FILE):
        raise BadPrompt(f"{name}: {what}s are not fetched from the network; give {'a file or ' if files else ''}a data "
                        "URL")
    if not files and not is_data(source):
        raise BadPrompt(f"{name}: this server reads no files; give a data URL, or start it with --image-files")
    try:
        yield partial(_bytes_of, source)
    except (BadPrompt, MemoryError):
        raise
    except ModuleNotFoundError as error:
        raise BadPrompt(f"{what}s need a package that is not installed: pip install {error.name}") from error
    except Exception as error:
        reason = "its format is not known" if type(error).__name__ == "UnidentifiedImageError" else (
            getattr(error, "strerror", None) or error)
        raise BadPrompt(f"{name} cannot be read: {reason}") from error


def local_path(source: str) -> Path:
    """The path that a source names."""
    return Path(source.removeprefix(FILE)).expanduser()


def _bytes_of(source: str) -> bytes:
    return data_bytes(source) if is_data(source) else read_input(local_path(source))


def data_bytes(url: str) -> bytes:
    """Return what a data URL holds: base64, with or without padding and line breaks, or percent-encoded bytes;
    ValueError where it holds none.

    Source: RFC 2397, section 3; "data: URL processor" in WHATWG's Fetch.
    """
    head, comma, rest = url.partition(",")
    if not comma:
        raise ValueError("a data URL needs a comma before its data")
    data = _unquoted(rest)
    if not head.rstrip().lower().endswith(";base64"):
        return data
    data = data.translate(None, b" \t\n\f\r")
    return base64.b64decode(data + b"=" * (-len(data) % 4), validate=True)


def _unquoted(text: str) -> bytes:
    """The bytes of a percent-encoded text, part by part: a list of all its escapes would take 20 times its memory."""
    out, begin = bytearray(), 0
    while begin < len(text):
        end = begin + PART_NBYTES
        cut = text.rfind("%", end - 2, end)  # an escape stays whole
        end = cut if cut > begin else end
        out += unquote_to_bytes(text[begin:end])
        begin = end
    return bytes(out)


def pillow_image(data: bytes, name: str) -> Any:
    """Pillow's image of a file's bytes, not decoded yet; BadPrompt for one with too many pixels."""
    from PIL import Image

    with warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning):  # it is refused below
        image = Image.open(io.BytesIO(data))
    if image.width * image.height > MOST_PIXELS:
        raise BadPrompt(f"{name} has {image.width} x {image.height} pixels; make it smaller")
    return image


def _upright(image: Any) -> Any:
    from PIL import ImageOps

    return ImageOps.exif_transpose(image).convert("RGB")


def media_prompt(
    messages: Sequence[Mapping[str, Any]], media: Sequence[Any], processor: Any, template: ChatTemplate,
    told: dict[str, Any] | None = None,
) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Token ids of a chat with images and videos, and what `generate` takes with them.

    Args:
        messages: The chat's, with a part for each of the images and videos.
        media: What was opened of these, in order.
        processor: The model's.
        template: The model's.
        told: What the chat template is given with the messages.

    Raises:
        BadPrompt: The template or the processor refuses the chat.
    """
    videos = [each for each in media if isinstance(each, Video)]
    asked: dict[str, Any] = {"images": [each for each in media if not isinstance(each, Video)] or None}
    if videos:
        asked |= {"videos": [each.frames for each in videos], "do_sample_frames": False,
                  "video_metadata": [dict(each.facts) for each in videos]}
    try:
        text = template.render([dict(message) for message in messages], told)
        made = processor(text=[text], return_tensors="pt", add_special_tokens=False, **asked)
    except MemoryError:
        raise
    except Exception as error:  # each processor checks its inputs in its own way
        raise BadPrompt(f"the model's processor refuses it: {' '.join(str(error).split())[:200]}") from error
    given = {name: value for name, value in made.items() if name not in ("input_ids", "attention_mask")}
    return made["input_ids"][0].tolist(), given
