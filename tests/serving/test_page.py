"""The server's page in a real browser, where playwright and a chromium are installed."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving.served import BUDGET, Running, save_model, serving

from forebay.rewriter.ir.byte_sizes import format_nbytes
from forebay.rewriter.ir.plan import KEPT
from forebay.serving.app import _Endpoints
from forebay.serving.text_codec import TextCodec

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
MARKDOWN = ("# T\n\n- **b** `c`\n\n```py\nd < e\n```\n\n|f|g|\n|-|-|\n|h|i|\n\n"
            "<img src=x onerror=alert(1)> [j](javascript:k)")
DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@contextlib.contextmanager
def opened(browser: Any, server: Running, **options: Any) -> Iterator[Any]:
    """The page of a server, which fetches nothing from elsewhere and fails nowhere."""
    context = browser.new_context(**options)
    page, asked, errors = context.new_page(), [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(error))
    page.on("console", lambda message: errors.append(message.text) if "Content Security" in message.text else None)
    page.goto(server.url)
    yield page
    context.close()
    assert not errors and all(url.startswith((server.url, "data:")) for url in asked)


def ask(page: Any, text: str) -> None:
    """Send a text, and wait for the end of its answer."""
    page.fill("[name=text]", text)
    page.press("[name=text]", "Enter")
    page.wait_for_selector("#stop[disabled]")


def test_the_page_talks_and_shows_what_it_sees(tmp_path: Path, browser: Any) -> None:
    """With a wrong key it says so; with the right one an answer arrives, memory and timeline are drawn. An answer is
    cut, stopped and kept, asked for again, and its question edited; the history is trimmed where it does not fit."""
    save_model(tmp_path)
    with serving(tmp_path, api_key="secret") as server, opened(browser, server) as page:
        page.wait_for_selector("text=send the server's key")
        page.click("#settings summary")
        page.fill("[name=key]", "wrong")
        page.fill("[name=temperature]", "0")
        page.fill("[name=max_tokens]", "8")
        ask(page, "w1 w2 w3")
        assert "send the server's key" in page.inner_text("#talk .error")
        page.fill("[name=key]", "secret")
        page.click("text=Again")
        page.wait_for_selector("text=The answer was cut")
        said = page.inner_text(".model .text")
        page.wait_for_selector("#timeline rect", state="attached")
        page.wait_for_selector("text=0 of 3 slots taken")
        assert page.locator("#memory span").count() == len(KEPT)
        assert f"budget {format_nbytes(BUDGET)}" in page.inner_text("#sizes")
        _, body = server.send("POST", "/v1/chat/completions", b'{"messages": [{"role": "user", "content": "w1 w2 w3"}],'
                              b' "max_tokens": 8, "temperature": 0}', Authorization="Bearer secret")
        assert said.strip() and said.strip().encode() in body
        server.gate.clear()
        page.fill("[name=text]", "w4")
        page.press("[name=text]", "Shift+Enter")
        page.press("[name=text]", "w")
        page.press("[name=text]", "Enter")
        page.click("#stop")
        page.wait_for_selector("text=Stopped.")
        server.gate.set()
        assert page.inner_text(".user .text >> nth=1") == "w4\nw"
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, "w5")
        assert [m["content"] for m in sent.value.post_data_json["messages"]] == ["w1 w2 w3", said, "w5"]
        ask(page, "w6 w7 w8")
        page.wait_for_selector(".trimmed")
        page.click(".user >> nth=1 >> text=Edit")
        assert page.input_value("[name=text]") == "w4\nw"
        ask(page, "w9")
        assert [each.inner_text() for each in page.query_selector_all(".user .text")] == ["w1 w2 w3", "w9"]
        page.click("#new")
        assert page.locator(".message").count() == 0


def test_the_page_shows_what_a_model_writes(
    tmp_path: Path, browser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Markdown is drawn, HTML is not, on a phone in the dark without scrolling sideways; a dropped image is sent."""
    save_model(tmp_path)
    monkeypatch.setattr(TextCodec, "decode", lambda self, ids, special=False: MARKDOWN[: 60 * len(ids)])
    monkeypatch.setattr(_Endpoints, "state", with_images(_Endpoints.state))
    with serving(tmp_path) as server, opened(
            browser, server, viewport={"width": 360, "height": 640}, color_scheme="dark",
            permissions=["clipboard-read", "clipboard-write"]) as page:
        page.wait_for_selector("#attach:visible")
        ask(page, "w1")
        assert page.inner_text(".model h1") == "T" and page.inner_text(".model li strong") == "b"
        assert page.inner_text(".model pre") == "d < e" and page.locator(".model td").count() == 2
        assert page.locator(".model img, .model a, .model script").count() == 0
        assert "<img src=x onerror=alert(1)> [j](javascript:k)" in page.inner_text(".model .text")
        page.click(".model pre + button")
        page.wait_for_selector("text=Copied")
        assert page.evaluate("navigator.clipboard.readText()") == "d < e"
        page.wait_for_selector("text=Copy py")
        page.click(".tools >> text=Copy")
        page.wait_for_selector("text=Copied")
        assert page.evaluate("navigator.clipboard.readText()") == MARKDOWN
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert sum(map(int, back.strip("rgb()").split(","))) < 150
        files = page.evaluate_handle("""dot => {
            const data = new DataTransfer(), bytes = Uint8Array.from(atob(dot), c => c.charCodeAt(0));
            data.items.add(new File([bytes], "a.png", {type: "image/png"}));
            return data;
        }""", DOT)
        page.dispatch_event("#ask", "drop", {"dataTransfer": files})
        page.wait_for_selector("#images img")
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, "w2")
        image, text = sent.value.post_data_json["messages"][-1]["content"]
        assert base64.b64decode(image["image_url"]["url"].partition(",")[2]) == base64.b64decode(DOT)
        assert text == {"type": "text", "text": "w2"} and page.locator(".user img").count() == 1
        assert "start it with --image-memory" in page.inner_text(".error")


def with_images(state: Any) -> Any:
    """The state of a server that claims to take images."""
    async def claimed(self: _Endpoints, request: Any) -> Any:
        reply = await state(self, request)
        body = json.loads(reply.body)
        body["server"]["images"] = True
        return type(reply)(body)

    return claimed
