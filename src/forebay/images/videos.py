"""Videos as frames: files that a library decodes, animated images, and lists of images. The model's processor chooses
the frames, as where transformers reads the file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from forebay.commands.prompts import BadPrompt
from forebay.images.processor import Video, is_data, local_path, open_image, opening, pillow_image, shown
from forebay.rewriter.ir.files import open_input
from forebay.rewriter.one_thread import one_thread

MOST_PIXELS = 1 << 27  # of all frames that are seen, which take 3 bytes each in memory
MOST_FRAMES = 1 << 16  # of an animated image
FRAME_MS = 100  # of an animated image that does not say how long a frame is shown
FRAMES_URL = "data:video/jpeg;base64,"  # whose frames are separated by commas, as vLLM has it
DECODERS = {"torchcodec": "torchcodec", "av": "pyav", "cv2": "opencv"}  # by package, transformers' names
HEAD_NBYTES = 16
MP4_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free")
Choose = Callable[[Any], "list[int]"]  # frames to see, of a video's facts


def open_video(part: Mapping[str, Any], processor: Any, files: bool = True) -> Video:
    """Open a video.

    Args:
        part: As `read_parts` gives it.
        processor: The model's, which chooses frames.
        files: Whether it may be a file, else a data URL.

    Raises:
        BadPrompt: It cannot be read, is too large, or the model takes no videos.
    """
    if getattr(processor, "video_processor", None) is None:
        raise BadPrompt("videos: this model takes images alone; give frames as images")
    source, rate = part["video"], part.get("fps")
    if isinstance(source, str) and source.startswith(FRAMES_URL):
        source = [f"data:image/jpeg;base64,{each}" for each in source[len(FRAMES_URL):].split(",")]
    if isinstance(source, list):
        return _of_images(source, rate, files)
    name = f"video {shown(source)}"

    def choose(facts: Any) -> list[int]:
        frames = _chosen(processor.video_processor, facts, rate)
        _check(name, len(frames), facts.height or 0, facts.width or 0)
        return frames

    with opening("video", source, files) as read:
        inline = is_data(source)
        head = (data := read())[:HEAD_NBYTES] if inline else _head(source)
        if not _is_film(head):
            return _of_animation(data if inline else read(), name, choose)
        with tempfile.NamedTemporaryFile() if inline else nullcontext() as kept:
            if kept is not None:
                kept.write(data)
                kept.flush()
            return _decoded(local_path(source) if kept is None else Path(kept.name), choose)


def _head(source: str) -> bytes:
    with open_input(local_path(source)) as file:
        return file.read(HEAD_NBYTES)


def _is_film(head: bytes) -> bool:
    """Return whether a file begins as MP4, MOV, Matroska, WebM or AVI. Playlists, which name other files, do not."""
    film = head[:4] == b"\x1a\x45\xdf\xa3" or (head[:4] == b"RIFF" and head[8:12] == b"AVI ")
    return film or head[4:8] in MP4_BOXES


def _chosen(videos: Any, facts: Any, rate: float | None) -> list[int]:
    """Frames that a processor of videos chooses by its settings, or by `rate` frames per second; all where it chooses
    none."""
    if not facts.total_num_frames:
        raise BadPrompt("a video must say how many frames it has; convert it to MP4")
    settings = {name: getattr(videos, name, None) for name in videos.valid_kwargs.__annotations__}
    if rate is not None:
        settings |= {"fps": rate, "num_frames": None}
    samples = settings.pop("do_sample_frames", None) or settings.get("fps") or settings.get("num_frames")
    settings = {name: value for name, value in settings.items() if name != "video_metadata"}
    chosen = videos.sample_frames(metadata=facts, **settings) if samples else range(facts.total_num_frames)
    return [int(i) for i in chosen]


def _check(name: str, frames: int, height: int, width: int) -> None:
    if frames * height * width > MOST_PIXELS:
        raise BadPrompt(f"{name} has {frames} frames of {width} x {height} pixels; give fewer frames (fps) or smaller "
                        "ones")


def _decoded(path: Path, choose: Choose) -> Video:
    """Frames of a file, by the first library that is installed."""
    found = [name for package, name in DECODERS.items() if find_spec(package)]
    if not found:
        raise BadPrompt("this video needs a package that decodes it: pip install av")
    frames, facts = _utilities().load_video(
        str(path), backend=found[0], sample_indices_fn=lambda metadata, **_: choose(metadata))
    chosen = [int(i) for i in facts.frames_indices]
    if len(frames) != len(chosen):
        raise BadPrompt(f"the video ends after {len(frames)} of {len(chosen)} frames that are to be seen")
    return Video(np.asarray(frames), {**facts, "frames_indices": chosen})


@one_thread
def _utilities() -> Any:
    """transformers' functions of videos."""
    from transformers import video_utils

    return video_utils


def _of_animation(data: bytes, name: str, choose: Choose) -> Video:
    """Frames of an animated image."""
    image = pillow_image(data, name)
    count = getattr(image, "n_frames", 1)
    if count > MOST_FRAMES:
        raise BadPrompt(f"{name} has {count} frames; make it shorter")
    shown_ms = sum(_shown_ms(image, i) for i in range(count))
    facts = _utilities().VideoMetadata(
        count, 1000 * count / shown_ms, image.width, image.height, shown_ms / 1000, "pillow")
    facts.frames_indices = choose(facts)
    return Video(np.stack([_frame(image, i) for i in facts.frames_indices]), dict(facts))


def _shown_ms(image: Any, frame: int) -> float:
    image.seek(frame)
    return image.info.get("duration") or FRAME_MS


def _frame(image: Any, frame: int) -> np.ndarray:
    image.seek(frame)
    return np.asarray(image.convert("RGB"))


def _of_images(sources: Sequence[str], rate: float | None, files: bool) -> Video:
    """A video whose frames are images of one size."""
    frames = [np.asarray(each) for each in _images(sources, files)]
    if len({each.shape for each in frames}) != 1:
        raise BadPrompt("video: its frames must be images of one size")
    count, (height, width, _) = len(frames), frames[0].shape
    return Video(np.stack(frames), {
        "total_num_frames": count, "fps": rate, "width": width, "height": height,
        "duration": count / rate if rate else None, "frames_indices": [*range(count)]})


def _images(sources: Sequence[str], files: bool) -> Iterable[Any]:
    for source in sources:
        image = open_image(source, files)
        _check("video", len(sources), image.height, image.width)
        yield image
