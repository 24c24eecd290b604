"""Chats as text, by the template of a model's tokenizer: within limits of time, memory and length."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

TIME_S = 5.0  # of the processor, for one chat
NBYTES = 1 << 30  # of the process's address space, Python and jinja2 in it
MOST_CHARACTERS = 1 << 24  # of one chat
TRIES = 3  # chats that may run out of time before no more are tried


class TemplateError(ValueError):
    """A chat that the template does not render; the message says why."""


class ChatTemplate:
    """Renders chats in a process of its own, since a template may compute for ever; started with the first chat."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._process: subprocess.Popen[str] | None = None
        self._ended = 0

    def render(self, messages: list[dict[str, Any]], told: dict[str, Any] | None = None) -> str:
        """The text of a chat, with the beginning of an answer, by a template that is `told` values of these names
        (`tools`, say); TemplateError where there is none."""
        if self._ended >= TRIES:
            raise TemplateError(f"{TRIES} others did not end; no more are tried")
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps([messages, told or {}]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._ended += 1
            ended_by = process.wait()
            self.close()
            raise TemplateError(f"it does not end within {TIME_S:g} s" if ended_by == -signal.SIGPROF else
                                f"the process that renders it ended with code {ended_by}")
        kind, text = json.loads(line)
        if kind == "error":
            raise TemplateError(" ".join(text.split()))
        return text

    def _start(self) -> subprocess.Popen[str]:
        template = self._tokenizer.get_chat_template()
        process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("render_chats.py"))], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, encoding="utf-8", process_group=0)
        assert process.stdin is not None
        process.stdin.write(json.dumps({
            "template": template, "tokens": self._tokenizer.special_tokens_map, "time_s": TIME_S, "nbytes": NBYTES,
            "most": MOST_CHARACTERS}, default=str) + "\n")
        return process

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def __enter__(self) -> ChatTemplate:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
