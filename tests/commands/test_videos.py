"""Videos in jobs and in `forebay chat`: files, data URLs and lists of frames."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as T
from filmed import Image, SmallProcessor, answer, film, gif, qwen, word_tokenizer
from pictured import picture
from typer.testing import CliRunner

from forebay.commands.app import app
from forebay.commands.prompts import BadPrompt
from forebay.images import chats, videos
from forebay.images.parts import BadPart, read_parts
from forebay.images.processor import media_prompt
from forebay.images.videos import open_video

pytestmark = [pytest.mark.filterwarnings("ignore:.*lies in memory"),
              pytest.mark.filterwarnings("ignore:OpenMP threads spin")]


def asked(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "w6 w7"}]}]


def shots(folder: Path, frames: np.ndarray) -> list[Path]:
    """The frames as files."""
    paths = [folder / f"frame{i}.png" for i in range(len(frames))]
    for path, frame in zip(paths, frames, strict=True):
        Image.fromarray(frame).save(path)
    return paths


@pytest.mark.all
def test_jobs_answer_lines_with_videos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file the frames that the processor chooses are seen, of a list all."""
    whole, processor = qwen(tmp_path)
    monkeypatch.setattr(chats, "load_processor", lambda folder: processor)
    one, other = film(0, 20), film(1, 4)
    path, frames = gif(tmp_path / "one.gif", one), shots(tmp_path, other)
    encoded = [base64.b64encode(each.read_bytes()).decode() for each in (path, *frames)]
    still = picture(tmp_path / "still.png", (200, 10, 30))
    listed = {"type": "video", "video": [*map(str, frames)], "fps": 2}
    forms = {
        "file": [{"type": "video", "video": str(path)}],
        "data": [{"type": "video_url", "video_url": {"url": f"data:image/gif;base64,{encoded[0]}"}}],
        "rate": [{"type": "video", "video": str(path), "fps": 10}], "frames": [listed],
        "jpeg": [{"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{','.join(encoded[1:])}"},
                  "fps": 2}],
        "mixed": [{"type": "image", "image": str(still)}, listed], "text": [],
        "fetched": [{"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}}],
        "broken": [{"type": "video", "video": str(tmp_path / "config.json")}]}
    lines = [{"id": name, "messages": asked(*parts)} for name, parts in forms.items()]
    (tmp_path / "asked.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = CliRunner().invoke(app, [
        "run", str(tmp_path), "--prompts", str(tmp_path / "asked.jsonl"), "--output", str(tmp_path / "out.jsonl"),
        "--budget", "6MB", "--new-tokens", "5", "--batch", "2"])
    assert found.exit_code == 3, found.output + repr(found.exception)
    said = " ".join(found.stderr.split())
    assert "a.mp4: videos are not fetched" in said and "config.json cannot be read: its format is not known" in said
    texts = {each["id"]: each["text"].strip() for each in map(json.loads, (tmp_path / "out.jsonl").open())}
    text = "user : <video> w6 w7 assistant :"
    wanted = {"file": answer(whole, processor, text, one), "frames": answer(
        whole, processor, text, other, fps=2, do_sample_frames=False)}
    wanted |= {"data": wanted["file"], "jpeg": wanted["frames"], "rate": answer(
        whole, processor, text, one[::2], fps=10, do_sample_frames=False), "mixed": answer(
            whole, processor, "user : <image> <video> w6 w7 assistant :", other, fps=2, do_sample_frames=False,
            images=[Image.open(still).convert("RGB")])}
    assert {name: texts[name] for name in wanted} == wanted
    assert len({*wanted.values(), texts["text"]}) == 5, "videos must matter"


def test_commands_take_videos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, processor = qwen(tmp_path)
    monkeypatch.setattr(chats, "load_processor", lambda folder: processor)
    path = gif(tmp_path / "one.gif", film(0, 20))
    said = f"w9\n/video {tmp_path / 'none.mp4'}\n/video {path}\nw8\n"
    found = CliRunner().invoke(app, ["chat", str(tmp_path), "--budget", "6MB", "--new-tokens", "5", "--temperature",
                                     "0"], input=said)
    assert found.exit_code == 0, found.output + repr(found.exception)
    first, second = found.stdout.strip().splitlines()
    text = f"user : w9 assistant : {first.strip()} user : <video> w8 assistant :"
    assert second.strip() == answer(whole, processor, text, film(0, 20))
    assert "none.mp4 cannot be read: No such file or directory" in found.stderr
    still = picture(tmp_path / "still.png", (200, 10, 30))
    found = CliRunner().invoke(app, ["run", str(tmp_path), "w6 w7", "--budget", "6MB", "--new-tokens", "5", "--video",
                                     str(path), "--image", str(still)])
    assert found.exit_code == 0, found.output + repr(found.exception)
    assert found.stdout.strip() == answer(whole, processor, "user : <image> <video> w6 w7 assistant :", film(0, 20),
                                          images=[Image.open(still).convert("RGB")])
    refused = CliRunner().invoke(app, ["run", str(tmp_path), "--prompts", "a", "--output", "b", "--video", str(path)])
    assert refused.exit_code == 2 and "--video is for one PROMPT" in refused.stderr


def test_what_cannot_be_taken_is_refused_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = SmallProcessor(None)
    frames = shots(tmp_path, film(0, 2))
    Image.new("RGB", (9, 9)).save(tmp_path / "small.png")
    (tmp_path / "list.mp4").write_text("#EXTM3U\nhttps://example.com/a.ts\n")
    (tmp_path / "film.mp4").write_bytes(b"\0\0\0\x18ftypisom" + bytes(90))
    cases: dict[str, Any] = {
        "this server reads no files": str(frames[0]), "list.mp4 cannot be read: its format is not known": str(
            tmp_path / "list.mp4"), "images of one size": [str(frames[0]), str(tmp_path / "small.png")]}
    for message, source in cases.items():
        with pytest.raises(BadPrompt, match=message):
            open_video({"type": "video", "video": source}, processor, not message.startswith("this server"))
    monkeypatch.setattr(videos, "find_spec", lambda name: None)
    with pytest.raises(BadPrompt, match="needs a package that decodes it: pip install av"):
        open_video({"type": "video", "video": str(tmp_path / "film.mp4")}, processor)
    monkeypatch.setattr(videos, "MOST_PIXELS", 5000)
    with pytest.raises(BadPrompt, match="has 8 frames of 40 x 30 pixels; give fewer frames"):
        open_video({"type": "video", "video": str(gif(tmp_path / "a.gif", film(0, 40)))}, processor)
    for part, message in (({"type": "video", "video": []}, "a video must be"),
                          ({"type": "input_audio"}, "audio is not taken; give text, images or videos"),
                          ({"type": "video", "video": "a.gif", "fps": 0}, "fps must be a number above 0")):
        with pytest.raises(BadPart, match=message):
            read_parts([part])


def test_films_are_decoded(tmp_path: Path) -> None:
    """By a library, where one is installed: the same frames as all of them decoded."""
    av = pytest.importorskip("av")
    path, whole = tmp_path / "film.mp4", np.repeat(film(0, 12)[:, :1, :1], 32, 1).repeat(32, 2)
    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=8)
        stream.width = stream.height = 32
        for each in whole:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(each, format="rgb24")))
        file.mux(stream.encode())
    with av.open(str(path)) as file:
        every = [each.to_ndarray(format="rgb24") for each in file.decode(video=0)]
    url = f"data:video/mp4;base64,{base64.b64encode(path.read_bytes()).decode()}"
    for source in (str(path), url):
        found = open_video({"type": "video", "video": source}, SmallProcessor(None))
        assert found.facts["frames_indices"] == [0, 2, 4, 6, 8, 10] and found.facts["fps"] == 8
        assert np.array_equal(found.frames, np.stack(every)[::2])
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(BadPrompt, match=r"film.mp4 cannot be read|ends after"):
        open_video({"type": "video", "video": str(path)}, SmallProcessor(None))


@pytest.mark.parametrize("kind", ["Qwen2_5_VL", "Qwen3VL"])
def test_processors_of_transformers_choose_the_same_frames(kind: str, tmp_path: Path) -> None:
    """Ids and pixels are those of the processor that is given all frames."""
    pytest.importorskip("torchvision")
    tokenizer = word_tokenizer(["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "user", "2"])
    of_videos = T.Qwen3VLVideoProcessor() if kind == "Qwen3VL" else T.Qwen2VLVideoProcessor(
        do_sample_frames=True, fps=2)
    processor = getattr(T, f"{kind}Processor")(T.Qwen2VLImageProcessor(), tokenizer, of_videos)
    whole, text = film(0, 90), "user <|vision_start|> <|video_pad|> <|vision_end|>"
    path = gif(tmp_path / "film.gif", whole)
    found = open_video({"type": "video", "video": str(path)}, processor)
    ids, given = media_prompt([], [found], processor, SimpleNamespace(render=lambda *_: text))
    facts = dict(total_num_frames=90, fps=20.0, width=40, height=30, duration=4.5)
    wanted = processor(text=[text], videos=[whole], video_metadata=[facts], return_tensors="pt")
    assert ids == wanted["input_ids"][0].tolist() and len(found.frames) < 20
    for name, value in given.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(wanted[name])), name
