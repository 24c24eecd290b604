"""The `forebay` commands and the Python of the pages run, in folders that hold what the pages name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from documented import Command, Workspace, commands, python_blocks
from selection import ALL, at_length
from typer.main import get_command
from typer.testing import CliRunner
from words import ROOT

import forebay
from forebay.commands.app import app
from forebay.serving.run_server import UvicornServer

FILES = {page.name: page for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}
PAGES = {name: commands(page) for name, page in FILES.items()}
# Pages whose lines `make test` runs, but for long ones; it reads the words of all others, which `make test-all` runs.
BRIEF = ("README.md", "embeddings.md")
BRIEF_PYTHON = ("README.md", "compile.md", "generation.md", "sessions.md")  # likewise
LONG = re.compile(r"--format (pt2|aoti)|--config|--gpus|flan-t5|--pareto")
# Files that a command's option promises.
WRITTEN = ("--output", "--save-plan", "--memory", "--pareto", "--session")
PIPELINE = "pipe."  # blocks over a pipeline of diffusers, a package that has tests of its own
PYTHON = {name: [block for block in python_blocks(page.read_text(encoding="utf-8")) if PIPELINE not in block]
          for name, page in FILES.items()}
# Pages whose Python stands in tests: of test_adding.py, test_pages.py.
QUOTED = ("adding.md", "debugging.md")
IDS = "ids = torch.randint(3, 250, (1, 12))\n"
TWO_LAYERS = "model, inputs = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)), torch.ones(2, 64)\n"
# Names that a page's text speaks of before its code.
PRELUDES = {
    "adapters.md": """
import peft, transformers
base = transformers.AutoModelForCausalLM.from_pretrained("BASE")
peft_model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"]))
""",
    "compile.md": TWO_LAYERS, "sessions.md": IDS, "generation.md": 'lm = forebay.wrap("MODEL", "100MB")\n' + IDS,
    "export.md": "from torch.export import Dim\nmodule, image = torch.nn.Linear(8, 4), torch.ones(2, 8)\n",
    "speculation.md": 'from forebay import wrap\nFOLDER, SMALLER = "MODEL", "BASE"\n' + IDS}


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("documented"))


@pytest.fixture
def replies(monkeypatch: pytest.MonkeyPatch) -> Replies:
    """Servers stop once they have answered the request of their page."""
    found, startup = Replies(), UvicornServer.startup

    async def started(server: UvicornServer, sockets: Any = None) -> None:
        await startup(server, sockets)
        found.servers += 1
        threading.Thread(target=found.send, args=(server, sockets[0].getsockname()[1])).start()

    monkeypatch.setattr(UvicornServer, "startup", started)
    return found


class Replies:
    """Answers to the request that a page shows below a server."""

    def __init__(self) -> None:
        self.servers = 0
        self.request: tuple[str, ...] = ()
        self.texts: list[str] = []

    def send(self, server: UvicornServer, port: int) -> None:
        try:
            if self.request:
                words = list(self.request)
                url = next(word for word in words if word.startswith("http")).replace(":8000", f":{port}")
                kind, body = (words[words.index(option) + 1] for option in ("-H", "-d"))
                asked = urllib.request.Request(url, body.encode(), dict([kind.split(": ")]))
                with urllib.request.urlopen(asked, timeout=120) as answer:
                    self.texts.append(answer.read().decode())
        finally:
            server.should_exit = True


@pytest.mark.parametrize("page", [name for name, found in PAGES.items() if found])
def test_commands(page: str, space: Workspace, replies: Replies, tmp_path: Path,
                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for command in PAGES[page]:
        monkeypatch.chdir(space.provide(page, command.line))
        if not ALL and (page not in BRIEF or LONG.search(command.line) or command.ranks > 1):
            read = CliRunner().invoke(app, [*command.words, "--help"])
            assert read.exit_code == 0, read.output
        elif command.ranks > 1:
            launch(command)
        else:
            said = run(command, replies)
            shown, shape = command.shown, skeleton
            if command.words[0] == "plan":
                end = next((i for i, line in enumerate(shown) if label(line) == "advice"), None)
                shown, shape = shown[:end], label
            assert {*map(shape, shown)} - {"…"} <= {*map(shape, said.splitlines())}, (
                f"{said}\n{command.shown}")
            assert command.pattern in said


def run(command: Command, replies: Replies) -> str:
    """Run a command in this process; its output."""
    first, before, replies.request = command.words[0], replies.servers, command.request
    if first in ("quantize", "export"):  # a page's examples are alternatives
        shutil.rmtree("OUT", ignore_errors=True)
    serves = ["--port", "0"] if first == "serve" else []
    result = CliRunner().invoke(app, [*command.words, *serves], input="Hello\n" if first == "chat" else "")
    assert result.exit_code == 0, f"{command.line}: {result.output[-2000:]} {result.exception!r}"
    assert result.output.strip()
    for option, path in zip(command.words, command.words[1:], strict=False):
        assert option not in WRITTEN or Path(path).stat().st_size, command.line
    assert replies.servers - before == (first == "serve")
    if command.request:
        assert "content" in replies.texts.pop()
    return result.output


def launch(command: Command) -> None:
    """Run a command on several ranks, as torchrun starts them."""
    python = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={command.ranks}", "-m", "forebay"]
    ended = subprocess.run([*python, *command.words], capture_output=True, text=True, timeout=300, check=False,
                           env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert ended.returncode == 0 and ended.stdout + ended.stderr, ended.stderr


def label(line: str) -> str:
    """What a line of a plan begins with; the rest, and advice, is of the machine."""
    return re.split(r"  |[,:]", line.strip())[0]


def skeleton(line: str) -> str:
    """A line of output with # for each number, with its unit, for names of machines, and for white space of columns."""
    line = re.sub(r"on \w+ #\w+", "on #", line)
    return " ".join(re.sub(r"\d[\d.]*( (min|s|ms|us|h|[KMG]iB)\b)?", "#", line).split())


def test_every_command_is_on_some_page() -> None:
    known = get_command(app).commands  # type: ignore[attr-defined]
    assert {command.words[0] for found in PAGES.values() for command in found} == known.keys() - {"help", "version"}


@pytest.mark.parametrize("page", [name if name in BRIEF_PYTHON else at_length(name)
                                  for name, blocks in PYTHON.items() if blocks and name not in QUOTED])
def test_python(page: str, space: Workspace, monkeypatch: pytest.MonkeyPatch,
                capsys: pytest.CaptureFixture[str]) -> None:
    prelude = PRELUDES.get(page, "")
    if "import peft" in prelude:
        pytest.importorskip("peft")
    monkeypatch.chdir(space.provide(page, "\n".join((prelude, *PYTHON[page]))))
    shutil.rmtree("OUT", ignore_errors=True)
    names: dict[str, Any] = {}
    for block in ("import forebay, torch", prelude, *PYTHON[page]):
        exec(compile(block, page, "exec"), names)
    said = capsys.readouterr().out
    if page == "README.md":
        assert "The capital of France is Paris" in said and "schedule" in said and "torch.Size([4, 1024])" in said
    for value in names.values():
        if isinstance(value, forebay.LanguageModel):
            value.close()
