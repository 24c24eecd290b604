"""A model's own processor of text and images. Images are files or data URLs, and never fetched from the network."""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from forebay.commands.chat_template import ChatTemplate
from forebay.commands.prompts import BadPrompt
from forebay.commands.terminal import JobError
from forebay.commands.tokenizer_bounds import check_folder
from forebay.rewriter.checkpoints.config import LOCAL_ONLY, require_regular_files
from forebay.rewriter.ir.files import read_input
from forebay.rewriter.one_thread import one_thread

MOST_PIXELS = 1 << 26  # of an image, which may take 3 bytes each in memory


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
    try:
        from PIL import Image, ImageOps
    except ModuleNotFoundError as error:
        raise BadPrompt(f"images need a package that is not installed: pip install {error.name}") from error

    shown = f"{source[:40]}…" if source.startswith("data:") and len(source) > 40 else source
    if source.lower().startswith(("http://", "https://")):
        raise BadPrompt(f"image {shown}: images are not fetched from the network; give "
                        f"{'a file or ' if files else ''}a data URL")
    if not files and not source.startswith("data:"):
        raise BadPrompt(f"image {shown}: this server reads no files; give a data URL, or start it with --image-files")
    try:
        if source.startswith("data:"):
            data = base64.b64decode(source.partition(",")[2], validate=True)
        else:
            data = read_input(Path(source.removeprefix("file://")).expanduser())
        with warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning):  # it is refused below
            image = Image.open(io.BytesIO(data))
        if image.width * image.height > MOST_PIXELS:
            raise BadPrompt(f"image {shown} has {image.width} x {image.height} pixels; make it smaller")
        return ImageOps.exif_transpose(image).convert("RGB")
    except (BadPrompt, MemoryError):
        raise
    except Exception as error:  # each format's decoder fails in its own way
        raise BadPrompt(f"image {shown} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def image_prompt(
    messages: Sequence[Mapping[str, Any]], images: Sequence[Any], processor: Any, template: ChatTemplate,
    told: dict[str, Any] | None = None,
) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Token ids of a chat with images, which its messages have as `IMAGE` parts, and what `generate` takes with them;
    BadPrompt where the template, which is `told` this, or the processor refuses it."""
    try:
        text = template.render([dict(message) for message in messages], told)
        made = processor(text=[text], images=list(images), return_tensors="pt", add_special_tokens=False)
    except MemoryError:
        raise
    except Exception as error:  # each processor checks its inputs in its own way
        raise BadPrompt(f"the model's processor refuses it: {' '.join(str(error).split())[:200]}") from error
    given = {name: value for name, value in made.items() if name not in ("input_ids", "attention_mask")}
    return made["input_ids"][0].tolist(), given
