"""The server's page in a real browser, where playwright and a chromium are installed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from serving.served import BUDGET, save_model, serving

from forebay.rewriter.ir.byte_sizes import format_nbytes

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
def test_the_page_talks_and_shows_what_it_sees(tmp_path: Path) -> None:
    """With a wrong key it says so; with the right one an answer arrives, memory and timeline are drawn, and nothing is
    fetched from elsewhere."""
    sync_api = pytest.importorskip("playwright.sync_api")
    save_model(tmp_path)
    with serving(tmp_path, api_key="secret") as server, sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page, asked, errors = browser.new_page(), [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(error))
        page.goto(server.url)
        page.fill("[name=tokens]", "8")
        page.fill("[name=key]", "wrong")
        page.fill("[name=text]", "w1 w2 w3")
        page.click("#ask button >> nth=0")
        page.wait_for_selector(".error")
        assert "send the server's key" in page.inner_text("#talk")
        page.fill("[name=key]", "secret")
        page.fill("[name=temperature]", "0")
        page.fill("[name=text]", "w1 w2 w3")
        page.click("#ask button >> nth=0")
        page.wait_for_selector("#talk b >> text=model")
        page.wait_for_selector("#stop[disabled]")
        said = page.inner_text("#talk").rpartition("model: ")[2]
        page.wait_for_selector("#timeline rect", state="attached")
        page.wait_for_selector("text=0 of 3 slots taken")
        assert page.locator("#memory span").count() == 4
        assert f"budget {format_nbytes(BUDGET)}" in page.inner_text("#sizes")
        browser.close()
        _, body = server.send("POST", "/v1/chat/completions", b'{"messages": [{"role": "user", "content": "w1 w2 w3"}],'
                              b' "max_tokens": 8, "temperature": 0}', Authorization="Bearer secret")
    assert said.strip() and said.strip().encode() in body
    assert not errors and all(url.startswith((server.url, "data:")) for url in asked)
