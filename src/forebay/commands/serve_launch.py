"""Launch scripts for a way to serve: command lines of this release and scripts around them, or why nothing runs it."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.rewriter.ir.files import write_text

if TYPE_CHECKING:
    from forebay.rewriter.serving.goodput import Goodput, ServiceLevel
    from forebay.rewriter.serving.strategies import ServiceWanted, Strategy

PORT = 8000  # of the first instance; the others follow
SERVED_SHARE = 90.0  # of requests that `forebay serve` keeps its goals for
SPREAD = 3  # times their spread that prompts and answers may be above their mean
MIB = 1 << 20


def launch_of(
    found: Sequence[Goodput], service: ServiceWanted, level: ServiceLevel, rate: float | None, model: str
) -> dict[str, Any]:
    """Commands for the best way, or if nothing runs that, for the best one that runs and serves anything: `why_not`
    says why, and `instead` which is meant. Where ranks compute but do not serve, `job` answers a file of prompts."""
    best = found[0].strategy
    why = why_not(best, service)
    meant = next((one for one in found if one.rate and why_not(one.strategy, service) is None), None)
    folder = _folder(model)
    launch: dict[str, Any] = {
        "strategy": None if meant is None else meant.strategy.name, "why_not": why, "instances": [],
        "instead": why is not None and meant is not None, "model": folder, "job": _job(best, service, folder)}
    if meant is not None:
        launch["serves_rate"] = None if rate is None else meant.rate >= rate
        launch["instances"] = _instances(meant.strategy, service, level, folder)
    return launch


def why_not(strategy: Strategy, service: ServiceWanted) -> str | None:
    """Return why this release cannot launch it; None where it can."""
    machine = service.streams_on if strategy.offloaded else service.machine
    if not machine.kind.runs:
        return f"Forebay runs on CPUs and NVIDIA GPUs, not on {machine.device_kind}"
    if strategy.prefill != strategy.decode:
        return "each server that computes prompts has one process that decodes them (--role), not more or fewer"
    if strategy.tensor_parallel > 1:
        return "`forebay serve` does not run on several ranks yet"
    return None


def _folder(model: str) -> str | None:
    """The folder of the model's weights; None where only its numbers are known."""
    path = Path(model).expanduser()
    path = path.parent if path.is_file() else path
    return str(path.resolve()) if path.is_dir() and any(path.glob("*.safetensors")) else None


def _instances(
    strategy: Strategy, service: ServiceWanted, level: ServiceLevel, folder: str | None
) -> list[dict[str, Any]]:
    machine = service.streams_on if strategy.offloaded else service.machine
    sizes, goals = _sizes(strategy, service), list[str]()
    if level.share == SERVED_SHARE and not strategy.prefill:
        goals = [f"--ttft {1e3 * level.ttft_s:g} --tpot {1e3 * level.tpot_s:g}",
                 f"--isl {service.traffic.prompt} --osl {service.traffic.output}"]
    apart = [f"--role {role} --handoff decode-{i + 1}.sock" for i in range(strategy.prefill)
             for role in ("decode", "prefill")]
    made = []
    for i, role in enumerate(apart or [""] * (strategy.both or 1)):
        port, options = PORT + i, [*sizes, *goals, *([role] if role else [])]
        environment = dict(machine.kind.visible(i))
        words = ["forebay serve", shlex.quote(folder or "MODEL"), f"--budget {_budget(strategy, service)}", *options]
        made.append({"name": f"instance-{i + 1}", "port": port, "environment": environment,
                     "command": " ".join([*(f"{k}={v}" for k, v in environment.items()), *words, f"--port {port}"]),
                     "arguments": [_budget(strategy, service), *options]})
    return made


def _budget(strategy: Strategy, service: ServiceWanted) -> str:
    """Return the budget of an instance: the whole device, or the given budget if it streams; host memory for its caches
    and weights."""
    machine = service.streams_on if strategy.offloaded else service.machine
    device = machine.tiers["device"].capacity_nbytes
    if strategy.offloaded and service.budget_nbytes:
        device = min(device, service.budget_nbytes)
    text = f"device={device // MIB}MiB" if device >= MIB else f"device={device}"
    host = machine.tiers["host"].capacity_nbytes if "host" in machine.tiers else 0
    return text + (f",host={host // MIB}MiB" if strategy.offloaded and machine.host_hop and host else "")


def _sizes(strategy: Strategy, service: ServiceWanted) -> list[str]:
    """Places, and the longest prompt and answer: of a trace its own, else `SPREAD` times the spread above the mean, or
    what the model has positions for."""
    traffic = service.traffic
    above, mean = 1 + SPREAD * traffic.length_cv, traffic.prompt + traffic.output
    if service.positions:
        above = max(1.0, min(above, (service.positions - 2) / mean))  # both are rounded up
    prompt, output = math.ceil(above * traffic.prompt), math.ceil(above * traffic.output)
    if traffic.trace:
        prompt, output = max(r.prompt for r in traffic.trace), max(r.output for r in traffic.trace)
    return [f"--batch-slots {strategy.offloaded or service.batch}", f"--prompt {prompt} --new-tokens {output}"]


def _job(strategy: Strategy, service: ServiceWanted, folder: str | None) -> str | None:
    """Ranks that share a model answer a file of prompts, though no requests."""
    if strategy.tensor_parallel < 2 or not service.machine.kind.runs:
        return None
    return (f"torchrun --nproc-per-node={strategy.tensor_parallel} --no-python forebay run "
            f"{shlex.quote(folder or 'MODEL')} --prompts IN.jsonl --output OUT.jsonl --batch {service.batch} "
            f"--budget {_budget(strategy, service)}")


def write_launch(data: dict[str, Any], folder: Path) -> list[str]:
    """A script for each instance, and where they are devices of one machine one that starts all; the choice as JSON."""
    launch, written = data["launch"], []
    for one in launch["instances"]:
        written.append(_script(folder / f"{one['name']}.sh", _instance_lines(one, data)))
    if len(written) > 1 and (launch["instances"][0]["environment"] or "--role" in launch["instances"][0]["command"]):
        written.append(_script(folder / "launch.sh", _all_lines(launch["instances"])))
    choice = {"kind": "serve-choice", "model": data["model"], "best": data["strategies"][0], "launch": launch} | {
        key: data[key] for key in ("rate", "isl", "osl", "ttft_ms", "tpot_ms", "percentile")}
    path = folder / "choice.json"
    write_text(path, json.dumps(choice, indent=1, allow_nan=False) + "\n")
    return [*map(str, written), str(path)]


def _script(path: Path, lines: list[str]) -> Path:
    write_text(path, "\n".join(["#!/bin/sh", *lines]) + "\n")
    path.chmod(0o755)
    return path


def _instance_lines(one: dict[str, Any], data: dict[str, Any]) -> list[str]:
    launch = data["launch"]
    held = shlex.quote(launch["model"]) if launch["model"] else ""
    model = f'MODEL="${{MODEL:-{held}}}"' if held else (
        f': "${{MODEL:?set MODEL to the folder of {data["model"]} with its weights}}"')
    return [f"# {launch['strategy']}: {one['name']} of {len(launch['instances'])}, as forebay serve-plan chose it; it "
            "plans anew when it starts", *(f"export {k}={v}" for k, v in one["environment"].items()), model,
            f'exec forebay serve "$MODEL" --budget "${{BUDGET:-{one["arguments"][0]}}}" '
            f'{" ".join(one["arguments"][1:])} --port "${{PORT:-{one["port"]}}}" "$@"']


def _all_lines(instances: Sequence[dict[str, Any]]) -> list[str]:
    """All at once; what ends them ends each, and this when all have ended."""
    return ["# every instance; requests are to be spread over their ports by a proxy, which is not part of this",
            'cd "$(dirname "$0")" || exit 2', "started=", "trap 'kill -TERM $started 2>/dev/null' INT TERM",
            *(line for one in instances for line in (f"./{one['name']}.sh &", 'started="$started $!"')),
            "for each in $started; do", '    while kill -0 "$each" 2>/dev/null; do wait "$each"; done', "done"]
