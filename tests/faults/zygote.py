"""A process that has imported everything and forks a child for each command with a fault: `python -m
tests.faults.zygote` reads requests and writes outcomes, a line of JSON each.

A child that does not end is killed and its exit code is "hung". API scenarios do after a fault what a
caller would do: the same once more, in the same process.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import typer

from forebay.commands.app import app
from forebay.commands.jobs import AnswerFile, Ask, run_job
from forebay.commands.prompts import Prompt, PromptLine, load_tokenizer
from forebay.commands.terminal import JobError, clean_errors
from forebay.kernels.cpu_support import native
from forebay.language_model import LanguageModel
from forebay.open_model import open_model
from forebay.rewriter.capture import language_model
from forebay.rewriter.checkpoints.config import read_config
from forebay.rewriter.ir.plan import Budget, Workload
from forebay.rewriter.machine.profile import load_machine
from forebay.rewriter.planning.options import Options
from forebay.runtime.disk.uring import uring_available
from forebay.serving.app import ServingOptions
from forebay.serving.batcher import TRIES
from forebay.serving.run_server import ServerRun, Service, bound_socket
from tests.faults.inject import Fault, Faults

# Seconds that this process polls, which do not pass while the machine is stopped: until a child that computes nothing
# is said to hang, for how long it must have computed nothing, and until one that computes is.
LIMIT_S, IDLE_S, BUSY_S, POLL_S = 60.0, 20.0, 900.0, 0.005
NEW = 4
CAPTURING: Any = language_model


def _command(*arguments: object) -> int:
    try:
        app([str(a) for a in arguments])
    except SystemExit as end:
        return int(end.code or 0)
    raise AssertionError("a command ends by SystemExit")


def run(model: Path, case: Path) -> int:
    """Answers to a file of prompts, the weights streamed; goes on with what is in the file."""
    return _command("run", model, "--prompts", model / "prompts.jsonl", "--output", case / "out.jsonl", "--budget",
                    "device=260KiB", "--new-tokens", NEW, "--batch", 2, "--machine", model / "machine.json")


def many(model: Path, case: Path) -> int:
    """A job of many prompts, which enter slots as others end."""
    return _command("run", model, "--prompts", model / "many.jsonl", "--output", case / "out.jsonl", "--budget",
                    f"device=400KiB,disk={case}", "--new-tokens", NEW, "--batch", 16, "--machine",
                    model / "machine.json")


def quantize(model: Path, case: Path) -> int:
    return _command("quantize", model, case / "quantized", "--weights", "w4g32", "--shard-size", "128KiB")


def packed(model: Path, case: Path) -> int:
    """Answers of a quantized model."""
    return _command("run", model / "quantized", "--prompts", model / "prompts.jsonl", "--output", case / "out.jsonl",
                    "--budget", "device=260KiB", "--new-tokens", NEW, "--batch", 2, "--machine",
                    model / "machine.json", "--verify")


def job(model: Path, case: Path) -> int:
    """The part of `run` behind planning: answers are computed and written."""
    return _answering(case, *PLANNED["job"])


def spilled(model: Path, case: Path) -> int:
    """The same where the cache lies on disk, in a file of this case."""
    return _answering(case, PLANNED["spill"], PLANNED["job"][1])


def _answering(case: Path, lm: LanguageModel, encoded: list[Prompt]) -> int:
    ask = Ask(NEW, (2,))

    def use(_: object) -> list[Any]:
        with AnswerFile(case / "out.jsonl", {"model": "m"}) as answers:
            run_job(lm, encoded, answers, ask, lambda ids: " ".join(map(str, ids)))
        return sorted(json.loads(line)["text"] for line in (case / "out.jsonl").read_bytes().splitlines())

    return _twice(case, lambda: lm, use)


def generate(model: Path, case: Path) -> int:
    return _twice(case, lambda: PLANNED["generate"], _generated)


def spill(model: Path, case: Path) -> int:
    """A block of micro-batches whose cache lies on disk, and the weights too."""
    return _twice(case, lambda: PLANNED["spill"], _generated)


def served(model: Path, case: Path) -> int:
    """The real server over its socket, with clients that ask at once, half of them for a stream. Each must hear its
    whole answer or an error; who hears that the model failed asks again, of the same server."""
    def use(lm: LanguageModel) -> list[Any]:
        words = SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)), all_special_ids=(),
                                convert_tokens_to_ids=lambda tokens: [None for _ in tokens])
        server = ServerRun(Service(lm, words, (2,), 8, NEW, 9, ServingOptions("m", send_s=2.0)), 30)
        at, found, told = bound_socket("127.0.0.1", 0), {}, []

        def ask(port: int, number: int) -> None:
            for _ in range(TRIES):
                said = _asked(port, {"prompt": list(range(5 + number, 6 + 3 * number)), "max_tokens": NEW,
                                     "temperature": 0, "stream": number % 2 == 1})
                if not isinstance(said, JobError):
                    found[number] = said
                    break
                told.append(said)

        def ask_all() -> None:
            clients = [threading.Thread(target=ask, args=(at.getsockname()[1], i)) for i in range(4)]
            for client in clients:
                client.start()
            for client in clients:
                client.join()
            server.stop()

        asking = threading.Thread(target=ask_all)
        broken = server.run(at, asking.start)
        if asking.ident is not None:
            asking.join()
        if broken is not None:
            raise broken
        if told:
            raise told[0]
        return [found[i] for i in range(4)]

    return _twice(case, lambda: PLANNED["served"], use)


def _asked(port: int, body: dict[str, Any]) -> str | JobError:
    """The text of an answer, or what went wrong as the server tells it; anything else is a failure of this test."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        status, said = reply.status, reply.read().decode()
    except (OSError, HTTPException) as error:  # it has ended
        return JobError(f"no connection to the server: {error}; see /health")
    finally:
        connection.close()
    if status != 200:
        return JobError(json.loads(said)["error"]["message"])
    if not body["stream"]:
        return str(json.loads(said)["choices"][0]["text"])
    events = [json.loads(line[6:]) for line in said.splitlines() if line.startswith("data: {")]
    if "error" in events[-1]:
        return JobError(events[-1]["error"]["message"])
    assert said.endswith("data: [DONE]\n\n") and events[-1]["choices"][0]["finish_reason"], said
    return "".join(event["choices"][0]["text"] for event in events)


def planned(model: Path) -> dict[str, Any]:
    """Models ready to take memory: what comes before that is `run`'s to go through."""
    machine, opened = load_machine(model / "machine.json"), open_model(model)
    workload, disk = Workload(2, 8, NEW), {"cache_tier": "disk", "cache_tokens": 4, "prefill_chunk": 4}
    lines = (model / "prompts.jsonl").read_text().splitlines()
    prompts = [Prompt(PromptLine(i, i, line), tuple(range(5 + i, 6 + 3 * i))) for i, line in enumerate(lines, start=1)]
    return {"generate": LanguageModel(*opened, Budget(260 << 10), workload, Options(), machine),
            "spill": LanguageModel(*opened, Budget(500 << 10, disk=str(model)), workload,
                                   Options(micro_batches=2, **disk), machine),
            "served": LanguageModel(*opened, Budget(260 << 10), workload, Options(admitted=1), machine),
            "job": (LanguageModel(*opened, Budget(260 << 10), workload, Options(), machine), prompts)}


PLANNED: dict[str, Any] = {}  # made before a child is
CAPTURED: list[Any] = []  # the model's graphs, for commands that are not to make them once more


def compiled(model: Path, case: Path) -> int:
    """A module compiled in place, its weights in a spill file; what cannot be offloaded runs eagerly."""
    torch._dynamo.reset()
    logging.getLogger("torch").setLevel(logging.CRITICAL)  # it writes tracebacks of what it then raises

    def make() -> Any:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
        options: Any = {"budget": {"device": 100_000, "disk": str(case)}}
        return torch.compile(module, backend="forebay", options=options)

    def use(call: Any) -> list[Any]:
        with torch.no_grad():
            return [[round(v, 4) for v in row] for row in call(torch.linspace(-1, 1, 128).reshape(2, 64)).tolist()]

    return _twice(case, make, use)


def _generated(lm: Any) -> list[Any]:
    ids = torch.tensor([[0, 0, 7, 9, 11, 5], [3, 4, 5, 6, 7, 8]])
    mask = (ids > 0).long()
    return lm.generate(ids, attention_mask=mask, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0).tolist()


def _twice(case: Path, make: Callable[[], Any], use: Callable[[Any], list[Any]]) -> int:
    """Make and use; after an error of the project's own the same again, with what was made if it was."""
    code, made = 0, None
    for _ in range(2):
        try:
            with clean_errors(False):
                made = made if made is not None else make()
                found = use(made)
                (case / "found.json").write_text(json.dumps(found))
                return code
        except typer.Exit as end:
            code = end.exit_code
    return 9


SCENARIOS = {f.__name__: f for f in (run, many, quantize, packed, job, spilled, generate, spill, served, compiled)}


def _child(request: dict[str, Any]) -> int:
    case, fault = Path(request["case"]), request["fault"]
    log = os.open(case / "stderr.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    keep = open  # as it is without faults
    if request["captured"]:
        CAPTURING.capture_model = lambda *_, **__: CAPTURED[0]
    faults = Faults(None if fault is None else Fault(*fault))
    if request["inject"]:
        faults.install()
    try:
        if request["storm"]:
            signal.signal(signal.SIGALRM, lambda *_: None)
            signal.siginterrupt(signal.SIGALRM, True)
            signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
        code = SCENARIOS[request["scenario"]](Path(request["model"]), case)
    except BaseException:
        traceback.print_exc()
        code = 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    for thread in threading.enumerate():  # as the interpreter does at its end
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    if "spill" in PLANNED:
        PLANNED["spill"].close()  # at its end too: a spill file that has a name loses it
    with keep(case / "faults.json", "w") as file:
        json.dump({"struck": faults.struck, "seen": [[*key, n] for key, n in faults.seen.items()]}, file)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _outcome(child: int, case: Path, kill_s: float | None) -> dict[str, Any]:
    polls = idle = used = 0
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        polls, before, used = polls + 1, used, _ticks(child)
        idle = idle + 1 if used == before else 0
        if kill_s is not None and polls * POLL_S > kill_s:
            os.kill(child, signal.SIGKILL)
        if polls > BUSY_S / POLL_S or (polls > LIMIT_S / POLL_S and idle > IDLE_S / POLL_S):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return {"code": "hung", "stderr": (case / "stderr.txt").read_text(errors="replace"), "struck": True}
        time.sleep(POLL_S)
    told = case / "faults.json"
    found = json.loads(told.read_text()) if told.exists() else {"struck": True, "seen": []}
    told.unlink(missing_ok=True)
    return found | {"code": os.waitstatus_to_exitcode(status),
                    "stderr": (case / "stderr.txt").read_text(errors="replace")}


def _ticks(child: int) -> int:
    """Processor time of a child so far, in the system's ticks."""
    fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def main() -> None:
    torch.set_num_threads(1)  # OpenMP's threads would not be there after a fork
    native.load()
    uring_available()
    model = Path(sys.argv[1])
    load_tokenizer(model)
    PLANNED.update(planned(model))
    CAPTURED.append(CAPTURING.capture_model(read_config(model), dtype=torch.float32, gives="last"))
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would not be there after a fork"
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            os._exit(_child(request))
        print(json.dumps(_outcome(child, Path(request["case"]), request["kill_s"])), flush=True)


if __name__ == "__main__":
    main()
