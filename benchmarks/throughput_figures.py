"""What the turns of `benchmarks.throughput` come to: rates, bounds, errors, and which aims are met."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarks.disk_offload import print_table
from benchmarks.throughput_cells import FOREBAY, HYBRID, PEERS

BINDS = 1.5  # one bound binds where the other is this many times as high

Row = dict[str, Any]


def figures(model: Row) -> list[Row]:
    """A row for each cell and contestant: rates, bounds and errors, medians over turns of what was found in a turn."""
    rows = []
    turns: dict[tuple[str, str], list[Row]] = {}
    for turn in model["turns"]:
        turns.setdefault((turn["cell"], turn["name"]), []).append(turn)
    for plan in model["plans"]:
        found, batch = turns.get((plan["cell"], plan["name"]), []), plan["batch"]
        if not found:  # the time was up
            continue
        ours = FOREBAY.get(plan["name"])
        held = held_nbytes(model, plan["name"])
        row = {"model": model["sizes"]["family"], "cell": plan["cell"], "name": plan["name"], "batch": batch,
               "micro_batches": plan.get("micro_batches", 1),
               "tokens_per_s": median(batch / mean(t["steps_s"]) for t in found),
               "objects_nbytes": held - model["baselines"][plan["name"]],
               "peak_nbytes": max(t["peak"] for t in found) - held,
               "budget": model["budget"]}
        if all("prefill_s" in t for t in found):
            row["prefill_s"] = median(t["prefill_s"] for t in found)
            new = int(plan["cell"].rpartition("+")[2])
            row["whole_tokens_per_s"] = median(
                batch * new / (t["prefill_s"] + (new - 1) * mean(t["steps_s"])) for t in found)
        if ours is not None:
            row["step_error"] = median(  # the first step gives the cache its room: it is the prompt's in a prediction
                t["predicted_step_s"] / mean(t.get("steady_s") or t["steps_s"]) - 1 for t in found)
            if "prefill_s" in row:
                row["prefill_error"] = median(t["predicted_prefill_s"] / t["prefill_s"] - 1 for t in found)
        if ours is not None and not ours.ram:
            row |= {"planned_read_nbytes": plan["planned_read_nbytes"], "cache": plan["cache"],
                    "read_nbytes": median(t.get("read_nbytes", 0) for t in found),
                    "link_tokens_per_s": median(batch / link_bound_s(plan, t["link"]) for t in found)}
            rams = turns.get((plan["cell"], f"ram {ours.formats}"))
            if rams:
                in_ram = next(p["batch"] for p in model["plans"]
                              if p["cell"] == plan["cell"] and p["name"] == f"ram {ours.formats}")
                row["ram_tokens_per_s"] = median(in_ram / mean(t["steps_s"]) for t in rams)
                row["cores_tokens_per_s"] = cores_bound(row, model["machine"].get("reads_core_share", 0.0))
            peers = [batch_of(model, plan["cell"], name) / mean(t["steps_s"])
                     for name in PEERS for t in turns.get((plan["cell"], name), ())]
            if peers:
                row["times_peer"] = row["tokens_per_s"] / max(peers)
        rows.append(row)
    return rows


def link_bound_s(plan: Row, link: Row) -> float:
    """Seconds that the plan's bytes take at the rates of plain reads and writes, one after the other."""
    return plan["planned_read_nbytes"] / link["bytes_per_s"] + plan["planned_written_nbytes"] / link[
        "written_bytes_per_s"]


def cores_bound(row: Row, share: float) -> float:
    """Tokens per second where the cores compute as fast as in memory, and bear `share` of the time of the link."""
    return 1 / (1 / row["ram_tokens_per_s"] + share / row["link_tokens_per_s"])


def held_nbytes(model: Row, name: str) -> int:
    """Anonymous memory of a contestant's process when all cells were planned: imports, graphs and plans."""
    return max([model["baselines"][name], *(p["held_nbytes"] for p in model["plans"]
                                            if p["name"] == name and "held_nbytes" in p)])


def batch_of(model: Row, cell: str, name: str) -> int:
    return next(p["batch"] for p in model["plans"] if (p["cell"], p["name"]) == (cell, name))


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def binds(row: Row) -> str:
    """Which bound binds clearly: link, compute, or neither ("both")."""
    link, compute = row["link_tokens_per_s"], row.get("ram_tokens_per_s", float("inf"))
    return "link" if BINDS * link <= compute else "compute" if BINDS * compute <= link else "both"


def verdicts(rows: list[Row], models: list[Row]) -> tuple[dict[str, bool | None], list[str]]:
    """Which aims were met, null where no row says, and a line for each."""
    blocks = [r for r in rows if "link_tokens_per_s" in r and r["name"].endswith("zigzag")]
    held = {side: [r["tokens_per_s"] / r[key] for r in blocks if binds(r) == side]
            for side, key in (("link", "link_tokens_per_s"), ("compute", "ram_tokens_per_s"))}
    beside = {formats: [r["times_peer"] for r in blocks if "times_peer" in r and r["name"].split()[1] == formats
                        and binds(r) == "link"] for formats in ("bf16", "w4+kv4")}
    larger = [plan["batch"] / max(1, fit) for model in models for key, fit in model["fits"].items()
              for plan in model["plans"] if plan["name"].endswith("zigzag") and plan.get("cache") == "disk"
              and plan["cell"].partition(" x ")[2].replace(" ", "") == key]
    errors = [abs(r[key]) for r in rows for key in ("step_error", "prefill_error") if key in r]
    shares = list(between(rows))
    over = [r["peak_nbytes"] / r["budget"] for r in rows if "link_tokens_per_s" in r]
    found = {
        "effective batch >= 20 x what fits with the cache on the device": (larger and max(larger), 20.0),
        "decode >= 0.90 of the link bound where the link binds": (held["link"] and min(held["link"]), 0.9),
        "decode >= 0.95 of the run in memory where computing binds": (held["compute"] and min(held["compute"]), 0.95),
        "bf16 >= 4 x the best peer where the link binds": (beside["bf16"] and min(beside["bf16"]), 4.0),
        "w4+kv4 >= 10 x the best peer where the link binds": (beside["w4+kv4"] and min(beside["w4+kv4"]), 10.0),
        "checkpoints of a share >= 1.3 x K and V alone where one between is predicted to be best": (
            shares and min(kv for kv, _ in shares), 1.3),
        "and >= 1.15 x checkpoints alone": (shares and min(only for _, only in shares), 1.15),
        "predictions within 15 % in 9 of 10": (errors and mean([float(e <= 0.15) for e in errors]), 0.9)}
    cores = [r["tokens_per_s"] / r["cores_tokens_per_s"] for r in blocks if "cores_tokens_per_s" in r]
    holds = {aim: None if isinstance(value, list) else bool(value >= least) for aim, (value, least) in found.items()}
    summary = [f"{aim}: " + ("no cell says" if isinstance(value, list) else f"{value:.2f}")
               for aim, (value, _) in found.items()]
    if cores:
        summary.append("decode of what the cores allow, which bear a share of reads: "
                       f"{min(cores):.2f} to {max(cores):.2f}")
    return holds, [*summary, f"peak memory of Forebay's blocks: at most {max(over, default=0):.2f} of the budget"]


def between(rows: list[Row]) -> Iterator[tuple[float, float]]:
    """For each cell where a share of checkpoints is predicted to be faster than none and than all of them: how much
    faster than either the best was."""
    found: dict[tuple[str, str], dict[float, Row]] = {}
    for row in rows:
        if row["name"] in HYBRID:
            some, period = HYBRID[row["name"]].checkpoints or (0, 1)
            found.setdefault((row["model"], row["cell"]), {})[some / period] = row
    for cell in found.values():
        predicted = {share: row["tokens_per_s"] / (1 + row["step_error"]) for share, row in cell.items()}
        if {0.0, 1.0} < cell.keys() and 0 < max(predicted, key=predicted.__getitem__) < 1:
            best = max(row["tokens_per_s"] for share, row in cell.items() if 0 < share < 1)
            yield best / cell[0.0]["tokens_per_s"], best / cell[1.0]["tokens_per_s"]


def report(result: Row) -> None:
    """Print the rows, then what they say."""
    head = ["model", "cell", "contestant", "batch", "in", "decode tok/s", "link bound", "in memory", "cores",
            "of the bound", "x peer", "with prefill", "peak MB", "objects MB", "error %"]
    rows = []
    for r in result["rows"]:
        bounds = [r[k] for k in ("link_tokens_per_s", "ram_tokens_per_s") if k in r]
        rates = ("tokens_per_s", "link_tokens_per_s", "ram_tokens_per_s", "cores_tokens_per_s")
        rows.append([r["model"], r["cell"], r["name"], str(r["batch"]), str(r["micro_batches"]),
                     *(shown(r, key) for key in rates),
                     f"{r['tokens_per_s'] / min(bounds):.2f} {binds(r)}" if bounds else "", shown(r, "times_peer"),
                     shown(r, "whole_tokens_per_s"),
                     *(f"{r[key] / 1e6:.0f}" for key in ("peak_nbytes", "objects_nbytes")),
                     " ".join(f"{100 * r[k]:+.0f}" for k in ("step_error", "prefill_error") if k in r)])
    print(result["processor"])
    print_table(head, rows)
    for line in result["summary"]:
        print(line)


def shown(row: Row, key: str) -> str:
    return f"{row[key]:.2f}" if key in row else ""
