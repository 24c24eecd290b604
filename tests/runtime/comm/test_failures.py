"""A rank that dies, hangs or fails ends all others, with an error that names it; what was answered is kept."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import families
import pytest
import torch
import transformers as T
from budgets import attention_nbytes
from forked import Started, start_code
from selection import at_length

ENDS_S = 60.0  # 30 on a machine with nothing else to do
ADDRESS = "10.213.77.{}"  # of a rank in a network of its own
BUDGET = 420_000 + max(0, attention_nbytes(1, 4, 124, 16))

RANK = """
import os, sys, torch
torch.set_num_threads(1)
import forebay
from forebay.runtime.comm import watch
from forebay.commands.ranks import among_ranks
watch.SILENT_S = 4.0
folder, marks, mesh, budget, networks = sys.argv[1:]
rank = int(os.environ["RANK"])
if networks:
    import ctypes
    with open(f"/run/netns/{networks}{rank}") as network:
        assert ctypes.CDLL(None, use_errno=True).setns(network.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
with among_ranks(mesh, None):
    lm = forebay.wrap(folder, int(budget), batch=1, prompt=4, new_tokens=120, mesh=mesh)

    def seen(column, count=[0]):
        count[0] += 1
        if count[0] == 3:
            open(os.path.join(marks, str(rank)), "w").write(str(os.getpid()))
        if {fails} and rank == 1 and count[0] == 6:
            raise OSError(28, "No space left on device")
        import time; time.sleep(0.05)

    lm.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=110, do_sample=False, eos_token_id=None, on_token=seen)
    print("done", rank)
"""


ALONE = """
import atexit, threading
alive = lambda: [t.name for t in threading.enumerate() if t.name == "forebay-ranks"]
atexit.register(lambda: print("at the end", alive()))
from forebay.runtime.comm.ranks import join_ranks
join_ranks("cpu")
print("before", alive())
"""


def test_who_ends_without_leaving_ends_its_watch() -> None:
    """Python ends daemon threads within whatever they call, which takes the process down where that is C++."""
    ended = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=120,
                           env=os.environ | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                                             "MASTER_PORT": str(free_port())})
    assert ended.returncode == 0 and "before ['forebay-ranks']\nat the end []" in ended.stdout, ended.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    T.AutoModelForCausalLM.from_config(families.llama(2)).save_pretrained(path)
    return path


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]  # type: ignore[no-any-return]


def started(folder: Path, marks: Path, fails: bool, mesh: str, networks: str = "") -> list[Started]:
    """Two ranks; with `networks` each in the one of this name and its number, which are joined by a link."""
    port, code = free_port(), RANK.replace("{fails}", str(fails))
    return [start_code(marks.parent / f"told{rank}", code, str(folder), str(marks), mesh, str(BUDGET),
                       networks, RANK=str(rank), WORLD_SIZE="2", MASTER_PORT=str(port),
                       **({"MASTER_ADDR": ADDRESS.format(1), "GLOO_SOCKET_IFNAME": f"v{rank}"} if networks else {
                           "MASTER_ADDR": "127.0.0.1"}))
            for rank in range(2)]


def wait_for_steps(ranks: Sequence[Started], marks: Path) -> None:
    """Until both ranks have begun their steps; neither may have ended."""
    limit = time.monotonic() + 120
    while len(list(marks.iterdir())) < 2:
        assert time.monotonic() < limit and all(rank.process.is_alive() for rank in ranks), ranks[0].ended(0)
        time.sleep(0.05)


def end(ranks: Sequence[Started]) -> None:
    for rank in ranks:
        rank.process.kill()
        rank.process.join()


def require_named(ended: Any, said: str) -> None:
    """A rank that ended by itself, with no answer and one line that says who was lost."""
    assert ended.returncode == 2 and "done" not in ended.stdout
    last = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(last) == 1 and said in last[0], ended.stderr


def ip(*arguments: str) -> bool:
    """Whether a command of `ip` does what it is told."""
    try:
        return subprocess.run(["ip", *arguments], capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.fixture
def networks() -> Iterator[str]:
    """Two networks of their own, joined by a link; skipped where the machine does not allow them."""
    name = f"forebay{os.getpid()}_"
    try:
        if not all(ip("netns", "add", f"{name}{rank}") for rank in range(2)) or not ip(
                "link", "add", "v0", "netns", f"{name}0", "type", "veth", "peer", "name", "v1", "netns", f"{name}1"):
            pytest.skip("no network namespaces here")
        for rank in range(2):
            assert ip("-n", f"{name}{rank}", "addr", "add", f"{ADDRESS.format(rank + 1)}/24", "dev", f"v{rank}")
            assert all(ip("-n", f"{name}{rank}", "link", "set", device, "up") for device in ("lo", f"v{rank}"))
        yield name
    finally:
        for rank in range(2):
            ip("netns", "del", f"{name}{rank}")


@pytest.mark.parametrize(("how", "said", "mesh"), [
    ("kill", "rank 1 ", "2"), ("stop", "rank 1 has not been heard of", "2"),
    ("fail", "rank 1 failed: [Errno 28] No space left", "2"), at_length("kill", "rank 1 ", "stages=2")])
def test_a_rank_that_is_lost_is_named_and_nobody_waits_for_it(
    folder: Path, tmp_path: Path, how: str, said: str, mesh: str
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    ranks = started(folder, marks, how == "fail", mesh)
    try:
        if how != "fail":
            wait_for_steps(ranks, marks)
            assert ranks[1].process.pid
            os.kill(ranks[1].process.pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        began = time.monotonic()
        first = ranks[0].ended(120)
        assert how == "fail" or time.monotonic() - began < ENDS_S
        require_named(first, said)
    finally:
        end(ranks)


def test_ranks_whose_link_is_lost_end_on_both_sides(folder: Path, tmp_path: Path, networks: str) -> None:
    """Rank 0 keeps the store by which ranks hear of each other: the other one hears no more of that."""
    marks = tmp_path / "marks"
    marks.mkdir()
    ranks = started(folder, marks, False, "2", networks)
    try:
        wait_for_steps(ranks, marks)
        assert ip("-n", f"{networks}1", "link", "set", "v1", "down")
        began = time.monotonic()
        silent = "has not been heard of"
        for rank, said in zip(ranks, (f"rank 1 {silent}", f"store at {ADDRESS.format(1)} {silent}"), strict=True):
            ended = rank.ended(120)
            assert time.monotonic() - began < ENDS_S
            require_named(ended, said)
    finally:
        end(ranks)


@pytest.mark.all
def test_a_job_under_torchrun_is_gone_on_with_by_one_process(folder: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(families.VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    T.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    prompts, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [json.dumps({"prompt": f"w{i} w{i + 9}"}) for i in range(6)]
    job = ["--prompts", str(prompts), "--output", str(output), "--budget", f"device={180_000 + BUDGET}",
           "--new-tokens", "5", "--batch", "2"]
    prompts.write_text("\n".join(lines[:4]) + "\n")
    both = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "forebay", "run", str(folder)]
    subprocess.run([*both, *job], check=True, capture_output=True, timeout=300)
    first = [json.loads(line) for line in output.read_text().splitlines()]
    assert sorted(answer["id"] for answer in first) == [1, 2, 3, 4]
    prompts.write_text("\n".join(lines) + "\n")
    subprocess.run([sys.executable, "-m", "forebay", "run", str(folder), *job], check=True, capture_output=True,
                   timeout=300)
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert sorted(answer["id"] for answer in answers) == [1, 2, 3, 4, 5, 6] and answers[:4] == first
