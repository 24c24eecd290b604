"""Images in requests to the server, as OpenAI's and Anthropic's clients send them."""

from __future__ import annotations

import base64
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import openai
import pytest
from filmed import answer as film_answer
from filmed import film, gif, qwen
from pictured import Image, answer, llava, picture
from serving.served import serving

from forebay.build_model import build_model
from forebay.images import chats
from forebay.images.open_tower import image_options
from forebay.open_model import open_model
from forebay.rewriter.ir.plan import Budget, Workload
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.planning.options import Options
from forebay.serving.app import MOST_BODY_NBYTES

pytestmark = [pytest.mark.filterwarnings("ignore:.*lies in memory"),
              pytest.mark.filterwarnings("ignore:OpenMP threads spin")]


def test_clients_send_images(tmp_path: Path) -> None:
    """A client's images have transformers' answers, beside a text; what cannot be taken has a reason."""
    whole, processor = llava(tmp_path)
    one, other = picture(tmp_path / "one.png", (200, 10, 30)), picture(tmp_path / "other.png", (7, 90, 250))
    urls = [f"data:image/png;base64,{base64.b64encode(each.read_bytes()).decode()}" for each in (one, other)]
    opened = open_model(tmp_path, embeds=True)
    options = image_options(Options(admitted=1, machine=Machine.default()), opened[0], 24)
    lm = build_model(opened, Budget(4_000_000), Workload(3, 24, 8), options)
    with serving(tmp_path, planned=lm, new_tokens=8, image_nbytes=1 << 20) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)

        def ask(*sources: str) -> Any:
            parts: list[Any] = [{"type": "image_url", "image_url": {"url": each}} for each in sources]
            return client.chat.completions.create(model="tiny", temperature=0, max_tokens=5, messages=[
                {"role": "user", "content": [*parts, {"type": "text", "text": "w6 w7"}]}])

        wanted = [answer(whole, processor, f"user : {'<image> ' * len(each)}w6 w7 assistant :", *each).strip()
                  for each in ((one,), (other,), (one, other))]
        assert len(set(wanted)) == 3
        found = [ask(*each) for each in (urls[:1], urls[1:], urls)]
        assert [each.choices[0].message.content.strip() for each in found] == wanted
        assert found[2].usage.prompt_tokens == found[0].usage.prompt_tokens + 4
        Image.new("L", (1900, 1900), 99).save(file := BytesIO(), "png", compress_level=0)
        large = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        assert len(large) > 1.1 * MOST_BODY_NBYTES
        (tmp_path / "large.png").write_bytes(file.getvalue())
        assert ask(large).choices[0].message.content.strip() == answer(
            whole, processor, "user : <image> w6 w7 assistant :", tmp_path / "large.png").strip()
        source = {"type": "base64", "media_type": "image/png", "data": urls[0].partition(",")[2]}
        block = {"type": "image", "source": source}
        body = {"model": "tiny", "max_tokens": 5, "temperature": 0, "messages": [
            {"role": "user", "content": [block, {"type": "text", "text": "w6 w7"}]}]}
        status, reply = server.send("POST", "/v1/messages", json.dumps(body).encode())
        assert status == 200 and json.loads(reply)["content"][0]["text"].strip() == wanted[0]
        for source, message in ((str(one), "this server reads no files"), ("https://a.b/c.png", "not fetched from"),
                                ("data:image/png;base64,AAAA", "cannot be read")):
            with pytest.raises(openai.BadRequestError, match=message):
                ask(source)
    with serving(tmp_path, new_tokens=8) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
        with pytest.raises(openai.BadRequestError, match="text alone; start it with --image-memory"):
            ask(urls[0])


def test_the_next_turn_computes_no_image_again(tmp_path: Path) -> None:
    """Blocks of a prompt with an image serve one that begins with the same image alone: tokens of all images have one
    id."""
    whole, processor = llava(tmp_path)
    shown = {name: picture(tmp_path / f"{name}.png", color) for name, color in (("one", (200, 10, 30)),
                                                                                ("other", (7, 90, 250)))}
    opened = open_model(tmp_path, embeds=True)
    options = image_options(Options(admitted=1, machine=Machine.default(), prefix_cache="1MiB", prefill_chunk=4),
                            opened[0], 32)
    lm = build_model(opened, Budget(4_000_000), Workload(3, 32, 8), options)
    words = "w6 w7 w8 w9 w10 w11 w12"
    with serving(tmp_path, planned=lm, new_tokens=8, image_nbytes=1 << 20) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)

        def ask(name: str, last: str) -> tuple[str, int]:
            url = f"data:image/png;base64,{base64.b64encode(shown[name].read_bytes()).decode()}"
            parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}},
                                {"type": "text", "text": f"{words} {last}"}]
            found = client.chat.completions.create(model="tiny", temperature=0, max_tokens=5, messages=[
                {"role": "user", "content": parts}])
            return (found.choices[0].message.content.strip(), found.usage.prompt_tokens_details.cached_tokens)

        def wanted(name: str, last: str) -> str:
            return answer(whole, processor, f"user : <image> {words} {last} assistant :", shown[name]).strip()

        asked = [("one", "w13"), ("other", "w13"), ("one", "w14"), ("other", "w14"), ("one", "w13")]
        found = [ask(*each) for each in asked]
        assert [text for text, _ in found] == [wanted(*each) for each in asked]
        cached = [count for _, count in found]
        assert cached[0] == cached[1] == 0 and min(cached[2:]) >= 8, cached


def test_clients_send_videos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's clients send them: data URLs; files are refused, and read where the server may."""
    whole, processor = qwen(tmp_path)
    monkeypatch.setattr(chats, "load_processor", lambda folder: processor)
    paths = [gif(tmp_path / f"{seed}.gif", film(seed, 20)) for seed in range(2)]
    wanted = [film_answer(whole, processor, "user : <video> w6 w7 assistant :", film(seed, 20)) for seed in range(2)]
    assert wanted[0] != wanted[1]
    opened = open_model(tmp_path, embeds=True)
    options = image_options(Options(admitted=1, machine=Machine.default()), opened[0], 24)
    lm = build_model(opened, Budget(6_000_000), Workload(2, 24, 8), options)
    with serving(tmp_path, planned=lm, new_tokens=8, image_nbytes=1 << 20) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)

        def ask(url: str) -> str:
            parts: list[Any] = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": "w6 w7"}]
            return client.chat.completions.create(model="tiny", temperature=0, max_tokens=5, messages=[
                {"role": "user", "content": parts}]).choices[0].message.content.strip()

        urls = [f"data:image/gif;base64,{base64.b64encode(each.read_bytes()).decode()}" for each in paths]
        assert [ask(url) for url in urls] == wanted
        for source, message in ((str(paths[0]), "this server reads no files"), ("https://a.b/c.mp4", "not fetched"),
                                ("data:video/mp4;base64,AAAA", "cannot be read")):
            with pytest.raises(openai.BadRequestError, match=message):
                ask(source)
