"""Parts of a message in a chat: text and images, in the forms that clients give them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

IMAGE: dict[str, Any] = {"type": "image"}  # a part of a message, for a chat template
SOURCE = "image"  # of a part that was read: a file or a data URL
TEXT_PARTS = ("text", "input_text", "output_text")
IMAGE_PARTS = ("image_url", "input_image", "image")
OTHERS = {"video": "videos", "video_url": "videos", "input_audio": "audio", "audio": "audio", "audio_url": "audio"}
PARTS = '{"type": "text", "text": "…"} or {"type": "image_url", "image_url": {"url": "…"}}'


class BadPart(ValueError):
    """Why the parts of a message cannot be read."""


def read_parts(parts: Sequence[Any]) -> str | list[dict[str, Any]]:
    """Read the content of a message.

    Args:
        parts: As OpenAI, Anthropic and transformers have them.

    Returns:
        The text, where there is nothing else; else parts of text and of images, the source of each as `SOURCE`.

    Raises:
        BadPart: One is neither.
    """
    read = [_read_part(part) for part in parts]
    if not read:
        raise BadPart(f"there is none of {PARTS}")
    if all(part["type"] == "text" for part in read):
        return "".join(part["text"] for part in read)
    return read


def _read_part(part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in TEXT_PARTS and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    source = _source_of(part) if kind in IMAGE_PARTS else None
    if source:
        return {"type": "image", SOURCE: source}
    if isinstance(kind, str) and kind in OTHERS:
        raise BadPart(f"{OTHERS[kind]} are not taken; give text and images")
    raise BadPart(f"each part must be {PARTS}")


def _source_of(part: Mapping[str, Any]) -> str | None:
    """The file or URL of an image; None where there is none."""
    for name in ("image_url", "image", "url", "path"):
        value = part.get(name)
        if isinstance(value, Mapping):
            value = value.get("url")
        if isinstance(value, str):
            return value
    given = part.get("source")  # Anthropic's
    if isinstance(given, Mapping) and given.get("type") == "base64":
        return f"data:{given.get('media_type')};base64,{given.get('data')}"
    return given["url"] if isinstance(given, Mapping) and isinstance(given.get("url"), str) else None


def has_images(messages: Iterable[Mapping[str, Any]] | None) -> bool:
    """Return whether messages hold a part that is an image, read or not."""
    return any(isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS
               for message in messages or () for part in _parts(message))


def take_sources(messages: Iterable[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages as a chat template takes them, and the sources of their images in order; BadPart where a content is
    none."""
    plain, sources = list[dict[str, Any]](), list[str]()
    for message in messages:
        content = message["content"]
        if isinstance(content, list) and not isinstance(content := read_parts(content), str):
            sources += [part[SOURCE] for part in content if part["type"] == "image"]
            content = [IMAGE if part["type"] == "image" else part for part in content]
        plain.append({**message, "content": content})
    return plain, sources


def with_images(text: str, count: int) -> list[dict[str, Any]]:
    """The content of a message with so many images in front of its text."""
    return [*[IMAGE] * count, {"type": "text", "text": text}]


def _parts(message: Mapping[str, Any]) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else ()
