"""Parts of a message in a chat: text, images and videos, in the forms that clients give them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

IMAGE, VIDEO = "image", "video"  # types of parts that were read, which hold their source under the same name
TEXT_PARTS = ("text", "input_text", "output_text")
KINDS = {"image": IMAGE, "image_url": IMAGE, "input_image": IMAGE, "video": VIDEO, "video_url": VIDEO}
MOST_RATE = 1000  # frames per second
SOUNDS = ("input_audio", "audio", "audio_url")
PARTS = '{"type": "text", "text": "…"} or {"type": "image_url", "image_url": {"url": "…"}}'


class BadPart(ValueError):
    """Why the parts of a message cannot be read."""


def read_parts(parts: Sequence[Any]) -> str | list[dict[str, Any]]:
    """Read the content of a message.

    Args:
        parts: As OpenAI, Anthropic, vLLM and transformers have them.

    Returns:
        The text, where there is nothing else; else parts of text, of images and of videos. The latter hold a file or a
        data URL, and videos may hold a list of these, one for each frame, and `fps`.

    Raises:
        BadPart: One is none of these.
    """
    read = [_read_part(part) for part in parts]
    if not read:
        raise BadPart(f"there is none of {PARTS}")
    if all(part["type"] == "text" for part in read):
        return "".join(part["text"] for part in read)
    return read


def _read_part(part: Any) -> dict[str, Any]:
    named = part.get("type") if isinstance(part, Mapping) else None
    if named in TEXT_PARTS and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    kind = KINDS.get(named) if isinstance(named, str) else None
    source = _source_of(part, kind) if kind else None
    if kind and source:
        return dict[str, Any](type=kind) | {kind: source} | (_rate_of(part) if kind == VIDEO else {})
    if named in SOUNDS:
        raise BadPart("audio is not taken; give text, images or videos")
    raise BadPart('a video must be {"type": "video_url", "video_url": {"url": "…"}} or {"type": "video", "video": '
                  '["frame.png", …]}' if kind == VIDEO else f"each part must be {PARTS}")


def _source_of(part: Mapping[str, Any], kind: str) -> str | list[str] | None:
    """The file or URL of an image or a video, or the list of a video's frames; None where there is none."""
    for name in (f"{kind}_url", kind, "url", "path"):
        value = part.get(name)
        if isinstance(value, Mapping):
            value = value.get("url")
        if isinstance(value, str):
            return value
        if kind == VIDEO and isinstance(value, list) and all(isinstance(each, str) for each in value):
            return value
    given = part.get("source")  # Anthropic's
    if isinstance(given, Mapping) and given.get("type") == "base64":
        return f"data:{given.get('media_type')};base64,{given.get('data')}"
    return given["url"] if isinstance(given, Mapping) and isinstance(given.get("url"), str) else None


def _rate_of(part: Mapping[str, Any]) -> dict[str, float]:
    """The frames per second that a video is seen at, if its part says so."""
    rate = part.get("fps")
    if rate is None:
        return {}
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < MOST_RATE:
        raise BadPart(f"fps must be a number above 0, found {rate!r}")
    return {"fps": float(rate)}


def has_media(messages: Iterable[Mapping[str, Any]] | None) -> bool:
    """Return whether messages hold a part that is an image or a video, read or not."""
    return any(isinstance(part, Mapping) and part.get("type") in tuple(KINDS)
               for message in messages or () for part in _parts(message))


def take_media(messages: Iterable[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Messages as a chat template takes them, and the parts that are images and videos in order; BadPart where a
    content is none."""
    plain, media = list[dict[str, Any]](), list[dict[str, Any]]()
    for message in messages:
        content = message["content"]
        if isinstance(content, list) and not isinstance(content := read_parts(content), str):
            media += [part for part in content if part["type"] != "text"]
            content = [part if part["type"] == "text" else {"type": part["type"]} for part in content]
        plain.append({**message, "content": content})
    return plain, media


def with_media(text: str, kinds: Iterable[str]) -> list[dict[str, Any]]:
    """The content of a message with images and videos in front of its text."""
    return [*({"type": kind} for kind in kinds), {"type": "text", "text": text}]


def _parts(message: Mapping[str, Any]) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else ()
