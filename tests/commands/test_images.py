"""`forebay run --image` and `/image` in `forebay chat`, through a model's own processor."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import pytest
import transformers as T
from pictured import Image, answer, llava, picture
from typer.testing import CliRunner

import forebay
from forebay.commands.app import app
from forebay.commands.prompts import BadPrompt
from forebay.images.chats import ImageChats
from forebay.images.processor import open_image
from forebay.rewriter.machine.profile import Machine

pytestmark = [pytest.mark.filterwarnings("ignore:.*lies in memory"),
              pytest.mark.filterwarnings("ignore:OpenMP threads spin")]
def test_commands_answer_as_transformers_does(tmp_path: Path) -> None:
    whole, processor = llava(tmp_path)
    one, other = picture(tmp_path / "one.png", (200, 10, 30)), picture(tmp_path / "other.png", (7, 90, 250))
    limits = ["--budget", "4MB", "--new-tokens", "5"]
    found = CliRunner().invoke(app, ["run", str(tmp_path), "w6 w7", *limits, "--image", str(one), "--image",
                                     str(other)])
    assert found.exit_code == 0, found.output + repr(found.exception)
    text = "user : <image> <image> w6 w7 assistant :"
    assert found.stdout.strip() == answer(whole, processor, text, one, other).strip()
    planned = CliRunner().invoke(app, ["plan", str(tmp_path), "--budget", "4MB", "--prompt", "20"])
    assert "of a vision tower, read once per batch of images before the prefill" in planned.stdout, planned.output
    said = f"w9\n/image \n/image {tmp_path / 'none.png'}\n/image {other}\nw8\n"
    found = CliRunner().invoke(app, ["chat", str(tmp_path), *limits, "--temperature", "0"], input=said)
    assert found.exit_code == 0, found.output + repr(found.exception)
    first, second = found.stdout.strip().splitlines()
    text = f"user : w9 assistant : {first.strip()} user : <image> w8 assistant :"
    assert second.strip() == answer(whole, processor, text, other).strip()
    assert "none.png cannot be read: No such file or directory" in found.stderr
    assert "/image needs a file: /image FILE" in found.stderr
    refused = CliRunner().invoke(app, ["run", str(tmp_path), "--prompts", "a", "--output", "b", "--image", str(one)])
    assert refused.exit_code == 2 and "--image is for one PROMPT" in refused.stderr


def test_jobs_answer_lines_with_images(tmp_path: Path) -> None:
    """Lines of several forms, with and without images, answered beside each other; bad ones are told apart."""
    whole, processor = llava(tmp_path)
    one, other = picture(tmp_path / "one.png", (200, 10, 30)), picture(tmp_path / "other.png", (7, 90, 250))
    url = f"data:image/png;base64,{base64.b64encode(other.read_bytes()).decode()}"

    def asked(*parts: dict[str, object]) -> list[dict[str, object]]:
        return [{"role": "user", "content": [*parts, {"type": "text", "text": "w6 w7"}]}]

    local, linked = {"type": "image", "image": str(one)}, {"type": "image_url", "image_url": {"url": url}}
    fetched = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    lines = [{"id": "local", "messages": asked(local)}, {"id": "text", "prompt": "w8 w9 w10"},
             {"id": "two", "messages": asked(linked, local)}, {"id": "fetched", "messages": asked(fetched)},
             {"custom_id": "batch", "body": {"messages": asked(linked), "max_tokens": 5, "temperature": 0}},
             {"id": "video", "messages": asked({"type": "video", "video": "a.mp4"})},
             {"id": "parts", "messages": asked()}]
    (tmp_path / "asked.jsonl").write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "answers.jsonl"
    command = ["run", str(tmp_path), "--prompts", str(tmp_path / "asked.jsonl"), "--output", str(out), "--budget",
               "4MB", "--new-tokens", "5", "--batch", "2"]
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 3, found.output + repr(found.exception)
    said = " ".join(found.stderr.split())
    assert "image https://example.com/a.png: images are not fetched" in said and (
        "videos: this model takes images alone; give frames as images" in said)
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    texts = {each["id"]: each["text"] for each in answers if "text" in each}
    texts["batch"] = next(each["response"]["body"]["choices"][0]["message"]["content"] for each in answers
                          if each.get("custom_id") == "batch")
    text = "user : {} w6 w7 assistant :"
    for name, images in {"local": [one], "two": [other, one], "batch": [other]}.items():
        wanted = answer(whole, processor, text.format(" ".join(["<image>"] * len(images))), *images)
        assert texts[name].strip() == wanted.strip(), name
    assert len({texts["local"], texts["batch"]}) == 2, "images must matter"
    for name, said_text in {"text": "user : w8 w9 w10 assistant :", "parts": "user : w6 w7 assistant :"}.items():
        ids = processor.tokenizer(said_text, return_tensors="pt")
        tokens = whole.generate(**ids, max_new_tokens=5, do_sample=False)[0, ids["input_ids"].shape[1]:]
        assert texts[name].strip() == processor.tokenizer.decode(tokens, skip_special_tokens=True).strip(), name
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 3 and "5 of 7" in again.stderr.replace("5 of 6", "5 of 7"), again.output


def test_models_of_text_say_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    chats = ImageChats(tmp_path, cast("Any", None))
    for kind in ("image", "video"):
        with pytest.raises(BadPrompt, match=f"^{kind}s: a model of type 'llama' takes text alone here$"):
            chats.open({"type": kind, kind: "none.gif"})
    found = CliRunner().invoke(app, ["serve", str(tmp_path), "--image-memory", "1MB", "--budget", "4MB", "--port", "0"])
    assert found.exit_code == 2 and "--image-memory: a model of type 'llama' takes text alone" in found.stderr


@pytest.mark.filterwarnings("ignore")
def test_the_pipeline_of_transformers_takes_the_model(tmp_path: Path) -> None:
    whole, processor = llava(tmp_path)
    one = picture(tmp_path / "one.png", (200, 10, 30))
    parts = [{"type": "image", "image": Image.open(one)}, {"type": "text", "text": "w6 w7"}]
    chat = [{"role": "user", "content": parts}]
    with forebay.wrap(tmp_path, "4MB", prompt=24, new_tokens=8, machine=Machine.default()) as lm:
        pipe = T.pipeline("image-text-to-text", model=lm, processor=processor)
        found = pipe(text=chat, max_new_tokens=5, return_full_text=False)[0]["generated_text"]
    assert found.strip() == answer(whole, processor, "user : <image> w6 w7 assistant :", one).strip()


def test_images_come_from_files_and_data_urls_alone(tmp_path: Path) -> None:
    path, bad = picture(tmp_path / "one.png", (1, 2, 3)), tmp_path / "bad.png"
    data = path.read_bytes()
    encoded, seen = base64.b64encode(data).decode(), open_image(str(path)).tobytes()
    for url in (f"data:image/png;base64,{encoded}", f"data:;base64,{encoded.rstrip('=')}",
                f"DATA:image/png;name=a.png;Base64,{base64.encodebytes(data).decode()}",
                f"data:image/png;base64,{quote(encoded, safe='')}", f"data:image/png,{quote(data)}"):
        assert open_image(url).tobytes() == seen, url[:40]
    bad.write_bytes(b"no image")
    Image.new("1", (1 << 14, 1 << 13)).save(tmp_path / "large.png")
    for source, message in (("https://example.com/a.png", "not fetched from the network"),
                            ("data:image/png;base64,!", "cannot be read"), ("data:image/png", "needs a comma"),
                            (str(bad), "cannot be read"),
                            (str(tmp_path / "large.png"), "16384 x 8192 pixels; make it smaller"),
                            (str(tmp_path), "cannot be read")):
        with pytest.raises(BadPrompt, match=message):
            open_image(source)
