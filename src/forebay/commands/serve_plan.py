"""`forebay serve-plan`: how many instances of how many devices serve a load within its objectives, simulated."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.commands.options import DebugOption, in_output, panel_option
from forebay.commands.terminal import JobError, clean_errors, console, progress_bar
from forebay.rewriter.ir.files import read_input_text, write_text

if TYPE_CHECKING:
    from forebay.rewriter.machine.profile import Machine
    from forebay.rewriter.serving.goodput import Goodput, Measured, Prices, ServiceLevel
    from forebay.rewriter.serving.strategies import ServiceWanted

in_service, in_workload, in_offloading, in_simulation = map(
    panel_option, ("Service", "Workload", "Offloading", "Simulation"))

RATES = 9  # points of the picture against the rate, from a tenth of the goodput to 1.3 times it


@dataclass(frozen=True)
class LoadWanted:
    """The fields of a YAML file for `--workload`; times in milliseconds, lengths in tokens, rate in requests per second
    (None: only the goodput is searched)."""

    rate: float | None = None
    isl: int = 2048
    osl: int = 64
    ttft: float = 1500.0
    tpot: float = 70.0
    percentile: float = 90.0
    arrival_cv: float = 1.0
    length_cv: float = 0.0
    shared_prefix: int = 0
    trace: str | None = None


def serve_plan(
    model: Annotated[str, in_service(metavar="NAME|FILE", help="Preset model such as llama-3-8b, or a config.json.")],
    machine: Annotated[str | None, typer.Option(metavar="NAME|FILE",
        help="Device: a preset such as h100, or a machine profile. Default: this machine.")] = None,
    gpus: Annotated[int, in_service(min=1, help="Most devices of the service.")] = 8,
    rate: Annotated[float | None, in_workload(
        help="Requests per second to serve. Default: the most that can be served.")] = None,
    isl: Annotated[int | None, in_workload(help="Mean prompt, in tokens. Default: 2048.")] = None,
    osl: Annotated[int | None, in_workload(help="Mean answer, in tokens. Default: 64.")] = None,
    ttft: Annotated[float | None, in_workload(metavar="MS",
        help="Goal: milliseconds to the first token. Default: 1500.")] = None,
    tpot: Annotated[float | None, in_workload(metavar="MS",
        help="Goal: milliseconds per further token. Default: 70.")] = None,
    workload: Annotated[Path | None, in_workload(metavar="YAML", help="YAML file of the workload: rate, isl, osl, "
             "ttft, tpot, percentile, arrival_cv, length_cv, shared_prefix, trace. Options win over it.")] = None,
    tp: Annotated[str, in_service(metavar="N,…", help="Devices per instance to try.")] = "1,2,4,8",
    instances: Annotated[int, in_service(min=1, max=64, help="Most instances to try.")] = 5,
    batch: Annotated[int, typer.Option(min=1, help="Sequences decoded at once by an instance.")] = 16,
    prefill_batch: Annotated[int, in_service(min=1, help="Prompts computed at once.")] = 4,
    chunk: Annotated[int, in_service(min=0,
        help="Tokens of a step with chunks of prompts next to decoding; 0: whole prompts first.")] = 0,
    budget: Annotated[str | None, in_offloading(metavar="SIZE",
        help="Memory of one device that streams weights, which then competes too.")] = None,
    price: Annotated[float | None, in_service(help="Price of a device per hour, for costs per million tokens.")] = None,
    offload_machine: Annotated[str | None, in_offloading(metavar="NAME|FILE",
        help="Machine of the device that streams weights, which then competes too. Default: --machine.")] = None,
    offload_price: Annotated[float | None, in_offloading(
        help="Price of that device per hour. Default: --price.")] = None,
    requests: Annotated[int, in_simulation(min=2, max=1_000_000, help="Requests per simulation.")] = 500,
    runs: Annotated[int, in_simulation(min=1, max=10, help="Simulations per service, with different arrivals.")] = 3,
    paper: Annotated[bool, in_simulation("--paper",
        help="BestServe's own operators, efficiencies and simulators. Llama only; without a limit of memory.")] = False,
    jobs: Annotated[int, in_simulation(min=0, help="Processes; 0: one per core.")] = 0,
    save_dir: Annotated[Path | None, in_output(
        help="Folder for pictures, the best service's plan, and launch scripts.")] = None,
    as_json: Annotated[bool, in_output("--json", help="Result as JSON on stdout.")] = False,
    debug: DebugOption = False,
) -> None:
    """Simulate services of a model and rank them by goodput.

    \f
    Long: most of it is the options, one by one.
    """
    with clean_errors(debug):
        from forebay.rewriter.machine.presets import PresetError
        from forebay.rewriter.predict.model_shapes import ModelError
        from forebay.rewriter.serving.traffic import TrafficError

        given = {"rate": rate, "isl": isl, "osl": osl, "ttft": ttft, "tpot": tpot}
        try:
            load = _load(workload, {name: value for name, value in given.items() if value is not None})
            service = _service(model, machine, load, requests, budget)
            service = replace(service, batch=batch, prefill_batch=prefill_batch, chunk=chunk, paper=paper,
                              offload_machine=_machine(offload_machine) if offload_machine else None)
            if paper:
                _refuse_with_paper({"--chunk": chunk, "--budget": budget, "--offload-machine": offload_machine,
                                    "shared_prefix": load.shared_prefix})
            prices = _prices(price, offload_price)
            level = _level(load, runs)
            if save_dir is not None:
                save_dir.mkdir(parents=True, exist_ok=True)
            found, refused = _search(service, level, load.rate, (gpus, _sizes(tp), instances), (jobs, prices))
            if not found:
                raise JobError("nothing can serve this: " + "; ".join(_reasons(refused)))
        except (ModelError, PresetError, TrafficError) as error:
            raise JobError(str(error)) from error
        data = _data(found, refused, service, level, load, prices)
        from forebay.commands.serve_launch import launch_of, write_launch

        data["launch"] = launch_of(found, service, level, load.rate, model)
        if save_dir is not None:
            data["saved"] = [*_save(found[0], service, level, data, save_dir), *write_launch(data, save_dir)]
        print(json.dumps(data, indent=1, allow_nan=False)) if as_json else _show(data, level)


def _load(path: Path | None, given: dict[str, Any]) -> LoadWanted:
    """The YAML file's fields, and over them the options; JobError names a field that is wrong."""
    read: Any = {}
    if path is not None:
        import yaml

        try:
            read = yaml.safe_load(read_input_text(path))
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            raise JobError(f"{path} is not YAML: {error}") from error
        if not isinstance(read, dict):
            raise JobError(f"{path}: expected fields such as 'rate: 3.5', found {type(read).__name__}")
        known = {field.name for field in fields(LoadWanted)}
        unknown = sorted(str(name) for name in set(read) - known)
        if unknown:
            raise JobError(f"{path}: there is no {unknown[0]!r}; the fields are {', '.join(sorted(known))}")
        for name, value in read.items():
            whole = name in ("isl", "osl", "shared_prefix")
            fits = isinstance(value, str) if name == "trace" else not isinstance(value, bool) and isinstance(
                value, int if whole else int | float)
            if not fits:
                raise JobError(f"{path}: {name}: {value!r} is no " + ("file name" if name == "trace" else
                                                                     "whole number" if whole else "number"))
        if isinstance(read.get("trace"), str):
            read["trace"] = str(path.parent / read["trace"])
    load = LoadWanted(**(read | given))
    if load.trace and given.keys() & {"isl", "osl"}:
        raise JobError("--isl, --osl: a trace says how long its prompts and answers are; leave them out, or the trace")
    if load.rate is not None and not (load.rate > 0 and math.isfinite(load.rate)):
        raise JobError(f"--rate: {load.rate} is no number above 0")
    return load


def _service(model: str, machine: str | None, load: LoadWanted, requests: int, budget: str | None) -> ServiceWanted:
    from forebay.rewriter.ir.byte_sizes import parse_nbytes
    from forebay.rewriter.predict.model_shapes import load_config, load_model_shape
    from forebay.rewriter.serving.strategies import ServiceWanted, request_tokens
    from forebay.rewriter.serving.traffic import Traffic, TrafficError, mean_lengths, read_trace

    trace = read_trace(load.trace) if load.trace else ()
    prompt, output = mean_lengths(trace) if trace else (load.isl, load.osl)
    traffic = Traffic(load.rate or 1.0, requests, prompt, output, load.arrival_cv, load.length_cv, trace)
    traffic.validate()
    if not 0 <= load.shared_prefix < prompt:
        raise TrafficError(f"shared_prefix: {load.shared_prefix} is not between 0 and the prompt's {prompt} tokens")
    positions = _positions(load_config(model)[1])
    longest = max((request_tokens(r) for r in trace), default=prompt + output)
    if positions and longest > positions:
        raise TrafficError(f"prompt and answer of {longest} tokens go beyond the {positions} positions of the model; "
                           "shorter ones fit (--isl, --osl, or the trace)")
    return ServiceWanted(load_model_shape(model), _machine(machine), traffic, shared_prefix=load.shared_prefix,
                   budget_nbytes=parse_nbytes(budget, "--budget") if budget else 0, positions=positions)


def _positions(config: dict[str, Any]) -> int:
    """The most tokens of a sequence by a model's config; 0 where it names no limit, or attends by distance alone."""
    found = config.get("max_position_embeddings", config.get("n_positions", 0))
    return found if type(found) is int and not config.get("alibi") else 0


def _machine(machine: str | None) -> Machine:
    from forebay.commands.machine import machine_profile
    from forebay.rewriter.machine.presets import load_machine_or_preset

    return load_machine_or_preset(machine) if machine else machine_profile(None, Path("."))


def _prices(price: float | None, offloading: float | None) -> Prices | None:
    """None where no price is named; JobError for one that is none."""
    from forebay.rewriter.serving.goodput import Prices

    for name, value in (("--price", price), ("--offload-price", offloading)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise JobError(f"{name}: {value} is no number above 0")
    if price is None and offloading is not None:
        raise JobError("--offload-price is compared with --price; give that too")
    return None if price is None else Prices(price, offloading or price)


def _level(load: LoadWanted, runs: int) -> ServiceLevel:
    from forebay.rewriter.serving.goodput import ServiceLevel

    level = ServiceLevel(load.ttft / 1e3, load.tpot / 1e3, load.percentile, runs)
    level.validate()
    return level


def _sizes(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 1 <= int(part) <= 1024 for part in parts):
        raise JobError(f"--tp: {text!r} is not a list of numbers of devices such as 1,2,4,8")
    return tuple(sorted({int(part) for part in parts}))


def _refuse_with_paper(given: dict[str, Any]) -> None:
    """JobError for what BestServe's simulators have no place for: it would change nothing."""
    for name, value in given.items():
        if value:
            raise JobError(f"{name}: --paper computes whole prompts where all weights are held; leave one of both "
                           "out")


def _search(
    service: ServiceWanted, level: ServiceLevel, rate: float | None, space: tuple[int, tuple[int, ...], int],
    how: tuple[int, Prices | None],
) -> tuple[list[Goodput], dict[str, str]]:
    from forebay.kernels.build.process_limits import core_count
    from forebay.rewriter.serving.goodput import UNPRICED
    from forebay.rewriter.serving.search import search_services
    from forebay.rewriter.serving.strategies import strategies

    (jobs, prices), (candidates, refused) = how, strategies(service, *space)
    workers = min(jobs or core_count(), len(candidates))
    with progress_bar() as bar:
        task = bar.add_task("simulating", total=len(candidates), note="")
        found, later = search_services(candidates, service, level, rate, workers,
                                       lambda done: bar.update(task, completed=done, note=f"{done}/{len(candidates)}"),
                                       prices or UNPRICED)
    return found, refused | later


def _measured(one: Measured | None) -> dict[str, float] | None:
    return None if one is None else {
        "rate": one.rate, "ttft_ms": 1e3 * one.ttft_s, "ttft_ci_ms": 1e3 * one.ttft_ci_s, "tpot_ms": 1e3 * one.tpot_s,
        "tpot_ci_ms": 1e3 * one.tpot_ci_s, "preempted": one.preempted, "queue_grows": one.grows}


def _data(
    found: list[Goodput], refused: dict[str, str], service: ServiceWanted, level: ServiceLevel, load: LoadWanted,
    prices: Prices | None,
) -> dict[str, Any]:
    """Return the result as JSON data: strategies from the best on, and why others cannot serve."""
    from forebay.rewriter.serving.strategies import streams

    rows = []
    for one in found:
        cost = prices.per_million(one, service.traffic.output) if prices else math.inf
        strategy = one.strategy
        away = streams(strategy, service) if strategy.offloaded else None
        rows.append({
            "strategy": strategy.name, "devices": strategy.devices, "tensor_parallel": strategy.tensor_parallel,
            "collocated": strategy.both, "prefill": strategy.prefill, "decode": strategy.decode,
            "offloaded_batch": strategy.offloaded, "cache_on_host": strategy.staged,
            "checkpoint_share": None if away is None else away.checkpoints,
            "streamed_nbytes": None if away is None else away.nbytes,
            "machine": (service.streams_on if away else service.machine).name,
            "price_per_hour": prices.per_hour(strategy) if prices else None,
            "goodput": one.rate, "goodput_per_device": one.per_device,
            "serves_rate": None if load.rate is None else one.rate >= load.rate,
            "cost_per_million_tokens": cost if math.isfinite(cost) else None,
            "at_goodput": _measured(one.at_goodput), "at_rate": _measured(one.at_rate)})
    return {"kind": "serve-plan", "model": service.model.name, "machine": service.machine.name,
            "costs": "paper" if service.paper else "machine", "rate": load.rate, "isl": service.traffic.prompt,
            "osl": service.traffic.output, "ttft_ms": 1e3 * level.ttft_s, "tpot_ms": 1e3 * level.tpot_s,
            "percentile": level.share, "requests": service.traffic.count, "runs": level.runs, "batch": service.batch,
            "prefill_batch": service.prefill_batch, "strategies": rows, "refused": refused}


def _show(data: dict[str, Any], level: ServiceLevel) -> None:
    from rich.table import Table

    share, rate = f"P{level.share:g}", data["rate"]
    print(f"{data['model']} on {data['machine']}: prompts of {data['isl']}, answers of {data['osl']} tokens; "
          f"{share} TTFT <= {data['ttft_ms']:g} ms, TPOT <= {data['tpot_ms']:g} ms")
    table = Table(box=None, pad_edge=False)
    costs = any(row["cost_per_million_tokens"] for row in data["strategies"])
    at = "rate" if rate else "goodput"
    for name in ("strategy", "devices", "goodput/s", "per device", f"TTFT at {at}", f"TPOT at {at}",
                 *(["serves"] if rate else []), *(["cost/1M"] if costs else [])):
        table.add_column(name, justify="left" if name == "strategy" else "right", no_wrap=True)
    for row in data["strategies"]:
        times = row[f"at_{at}"]
        cells = [row["strategy"], str(row["devices"]), f"{row['goodput']:.3g}", f"{row['goodput_per_device']:.3g}",
                 f"{_plain(times['ttft_ms'])} ±{_plain(times['ttft_ci_ms'])} ms",
                 f"{_plain(times['tpot_ms'])} ±{_plain(times['tpot_ci_ms'])} ms"]
        cells += ["yes" if row["serves_rate"] else "no"] if rate else []
        cost = row["cost_per_million_tokens"]
        cells += ["-" if cost is None else f"{cost:.3g}"] if costs else []
        table.add_row(*cells)
    terminal = console(stderr=False)
    if not terminal.is_terminal:
        terminal.width = 120
    terminal.print(table)
    for reason in _reasons(data["refused"]):
        print(f"left out: {reason}")
    best = data["strategies"][0]
    if rate and not best["serves_rate"]:
        print(f"none serves {rate:g} requests/s within the objectives; more --gpus or --instances, or laxer objectives")
    elif not best["goodput"]:
        print("none keeps the objectives even at the lowest rate; laxer --ttft and --tpot, or larger --tp, may")
    launch = data["launch"]
    if launch["why_not"]:
        print(f"launch: nothing runs {best['strategy']} yet: {launch['why_not']}")
    for one in launch["instances"][:1]:
        more = f" (and {len(launch['instances']) - 1} more)" if len(launch["instances"]) > 1 else ""
        print(f"launch {launch['strategy']}{more}: {one['command']}")
    for path in data.get("saved", ()):
        print(f"wrote {path}")


def _reasons(refused: dict[str, str]) -> list[str]:
    """Return why ways are left out, each reason once, behind the ways that it holds for."""
    ways: dict[str, list[str]] = {}
    for way, why in refused.items():
        ways.setdefault(why, []).append(way)
    return [f"{', '.join(own)}: {why}" for why, own in ways.items()]


def _plain(value: float) -> str:
    """Three digits, and no exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _save(best: Goodput, service: ServiceWanted, level: ServiceLevel, data: dict[str, Any], folder: Path) -> list[str]:
    """Pictures of the best at the rate that was asked for, or its goodput; and the plan as JSON."""
    from forebay.commands.serve_pictures import draw_against_rate, draw_distributions
    from forebay.rewriter.serving.goodput import measure
    from forebay.rewriter.serving.strategies import simulated
    from forebay.rewriter.serving.traffic import arrivals

    found = simulated(best.strategy, service)
    rate = data["rate"] or best.rate or best.at_goodput.rate
    title = f"{best.strategy.name}, {service.model.name} on {service.machine.name}, {rate:.3g} requests/s"
    run = found.simulate(arrivals(service.traffic.at_rate(rate), 0), 0)
    paths = [folder / name for name in ("times.png", "against_rate.png", "serve_plan.json")]
    draw_distributions(run, level, title, paths[0])
    top = 1.3 * (best.rate or rate)
    points = [measure(found, service.traffic, level, top * (i + 1) / RATES) for i in range(RATES)]
    draw_against_rate(points, level, title.rpartition(",")[0], paths[1])
    write_text(paths[2], json.dumps(data, indent=1, allow_nan=False) + "\n")
    return [str(path) for path in paths]
