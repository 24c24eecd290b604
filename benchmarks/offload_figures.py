"""What the turns of `benchmarks.offload` come to: rates, bounds and errors."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from benchmarks.command import print_table, spread
from benchmarks.contestants import IN_RAM, OFFLOADED

BINDS = 1.5  # one bound binds where the other is this many times as high
WITHIN = 0.15  # of what was measured

Row = dict[str, Any]


def figures(model: Row, memory_bytes_per_s: float) -> list[Row]:
    """A row for each cell and contestant: rates, bounds and errors, medians over turns of what was found in a turn."""
    turns: dict[tuple[str, str], list[Row]] = {}
    for turn in model["turns"]:
        turns.setdefault((turn["cell"], turn["name"]), []).append(turn)
    batches = {(plan["cell"], plan["name"]): plan["batch"] for plan in model["plans"]}

    def rates(cell: str, name: str) -> list[float]:
        return [batches[cell, name] / fmean(t["steps_s"]) for t in turns.get((cell, name), ())]

    rows = []
    for plan in model["plans"]:
        cell, name = at = plan["cell"], plan["name"]
        if not (found := turns.get(at)):  # the time was up
            continue
        ours, batch, own = "planned_step_s" in plan, plan["batch"], rates(cell, name)
        held = held_nbytes(model, name)
        row: Row = {"model": model["model"], "cell": cell, "name": name, "batch": batch, "tokens_per_s": median(own),
                    "tokens_per_s_spread": [min(own), max(own)], "micro_batches": plan.get("micro_batches", 1),
                    "objects_nbytes": held - model["baselines"][name],
                    "budget": plan.get("budget", model["budget"]),
                    "peak_nbytes": max(t["peak"] for t in found) - held,
                    "cached_nbytes": max(t.get("cached_peak", 0) for t in found), "limited": name in model["limited"],
                    "resident_nbytes": max(t["resident_nbytes"] for t in found)}
        if all("prefill_s" in t for t in found):
            row["prefill_s"] = median(t["prefill_s"] for t in found)
            row["prompt_tokens_per_s"] = batch * int(cell.split()[2]) / row["prefill_s"]
            new = int(cell.rpartition("+")[2])
            row["whole_tokens_per_s"] = median(
                batch * new / (t["prefill_s"] + (new - 1) * fmean(t["steps_s"])) for t in found)
        if all("step_read_nbytes" in t for t in found):
            row |= kernel_counts(found)
        if "tokens" in found[0] and (reference := turns.get((cell, IN_RAM))):
            row["same_tokens"] = same_tokens(found[0]["tokens"], reference[0]["tokens"])
        if plan["ram"] and (nbytes := model["read_nbytes"].get(name)):
            row["memory_tokens_per_s"] = memory_bytes_per_s / nbytes
        if ours:
            # the first step gives the cache its room: it is the prompt's in a prediction
            errors = [t["predicted_step_s"] / fmean(t.get("steady_s") or t["steps_s"]) - 1 for t in found]
            row |= {"step_error": median(errors), "step_error_spread": [min(errors), max(errors)],
                    "predicted_step_s": median(t["predicted_step_s"] for t in found)}
            if "prefill_s" in row:
                row["prefill_error"] = median(t["predicted_prefill_s"] / t["prefill_s"] - 1 for t in found)
        if ours and not plan["ram"]:
            row |= {"planned_read_nbytes": plan["planned_read_nbytes"], "cache": plan["cache"],
                    "read_nbytes": median(t.get("read_nbytes", 0) for t in found)}
            if plan.get("pool_slots") and plan["expected_hits"] < 1:
                named = plan["planned_read_nbytes"] / (1 - plan["expected_hits"])
                row["hits"] = f"{1 - row['read_nbytes'] / named:.0%} ({plan['expected_hits']:.0%})"
            if plan["planned_read_nbytes"]:
                row["link_tokens_per_s"] = median(batch / link_bound_s(plan, t["link"]) for t in found)
            if in_ram := rates(cell, f"ram {plan['formats']}") or rates(cell, IN_RAM):
                row["ram_tokens_per_s"] = median(in_ram)
                row["cores_tokens_per_s"] = cores_bound(row, model["machine"].get("reads_core_share", 0.0))
            if peers := [rate for peer in OFFLOADED for rate in rates(cell, peer)]:
                row["times_peer"] = row["tokens_per_s"] / max(peers)
        rows.append(row)
    return rows


def kernel_counts(turns: Sequence[Row]) -> Row:
    """What the kernel counted: bytes that a step had the disk read, their share of plain reads, most of the group."""
    return {"link_share": median(t["step_read_nbytes"] / fmean(t["steps_s"]) / t["link"]["bytes_per_s"] for t in turns),
            "step_read_nbytes": median(t["step_read_nbytes"] for t in turns),
            "group_nbytes": max(t["group_peak"] for t in turns)}


def link_bound_s(plan: Row, link: Row) -> float:
    """Seconds that the plan's bytes take at the rates of plain reads and writes, one after the other."""
    return plan["planned_read_nbytes"] / link["bytes_per_s"] + plan["planned_written_nbytes"] / link[
        "written_bytes_per_s"]


def cores_bound(row: Row, share: float) -> float:
    """Tokens per second where the cores compute as fast as in memory, and bear `share` of the time of the link."""
    return 1 / (1 / row["ram_tokens_per_s"] + share / row.get("link_tokens_per_s", float("inf")))


def held_nbytes(model: Row, name: str) -> int:
    """Anonymous memory of a contestant's process when all cells were planned: imports, graphs and plans."""
    return max([model["baselines"][name], *(p["held_nbytes"] for p in model["plans"]
                                            if p["name"] == name and "held_nbytes" in p)])


def same_tokens(ours: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> float:
    """Of each sequence's answer the share of tokens before the first that differs, over sequences that both have."""
    pairs = list(zip(zip(*ours, strict=True), zip(*reference, strict=True), strict=False))
    same = sum(next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a)) for a, b in pairs)
    return same / (len(pairs) * len(ours))


def binds(row: Row) -> str:
    """Which bound binds clearly: link, compute, or neither ("both"); memory for weights in RAM."""
    if "memory_tokens_per_s" in row:
        return "memory"
    link, compute = (row.get(key, float("inf")) for key in ("link_tokens_per_s", "ram_tokens_per_s"))
    return "link" if BINDS * link <= compute else "compute" if BINDS * compute <= link else "both"


def summary(rows: Sequence[Row]) -> list[str]:
    """Lines on all rows: of the bound that binds, beside peers, predictions, memory."""
    blocks = [r for r in rows if "link_tokens_per_s" in r]
    found = []
    for side, key in (("link", "link_tokens_per_s"), ("compute", "ram_tokens_per_s")):
        if shares := [r["tokens_per_s"] / r[key] for r in blocks if binds(r) == side]:
            found.append(f"where the {side} binds decode is {min(shares):.2f} to {max(shares):.2f} of its bound")
    if cores := [r["tokens_per_s"] / r["cores_tokens_per_s"] for r in blocks if "cores_tokens_per_s" in r]:
        found.append("decode of what the cores allow, which bear a share of reads: "
                     f"{min(cores):.2f} to {max(cores):.2f}")
    if errors := [abs(r[key]) for r in rows for key in ("step_error", "prefill_error") if key in r]:
        within = sum(error <= WITHIN for error in errors)
        found.append(f"predicted within 15 %: {within} of {len(errors)}; median error {100 * median(errors):.1f} %, "
                     f"largest {100 * max(errors):.1f} %")
    over = [r["peak_nbytes"] / r["budget"] for r in blocks]
    if over:
        found.append(f"peak memory of Forebay's blocks: at most {max(over):.2f} of the budget")
    return found


def report(result: Row) -> None:
    """Print the rows, then what they say."""
    print(result["processor"])
    for model in result["models"]:
        reads = spread(turn["link"]["bytes_per_s"] / 1e9 for turn in model["turns"])
        print(f"{model['model']}: plain reads {reads} GB/s, memory {model['machine']['memory_bytes_per_s'] / 1e9:.1f} "
              f"GB/s; sequences that fit with their cache on the device: {model['fits'] or 'not asked'}")
    print_table([shown(row) for row in result["rows"]])
    for line in result["summary"]:
        print(line)


def shown(r: Row) -> Row:
    """A row as it is printed: the figures that it has."""
    bounds = [r[k] for k in ("link_tokens_per_s", "ram_tokens_per_s", "memory_tokens_per_s") if k in r]
    known = {title: f"{r[key]:.2f}" for title, key in (
        ("prefill s", "prefill_s"), ("link bound", "link_tokens_per_s"), ("in memory", "ram_tokens_per_s"),
        ("cores", "cores_tokens_per_s"), ("memory's", "memory_tokens_per_s"), ("x peer", "times_peer"),
        ("with prefill", "whole_tokens_per_s"), ("prompt tok/s", "prompt_tokens_per_s"))
        if key in r}
    return {"model": r["model"], "cell": r["cell"], "contestant": r["name"], "batch": str(r["batch"]),
            "in": str(r["micro_batches"]), **known,
            "decode tok/s": spread((r["tokens_per_s"], *r["tokens_per_s_spread"])),
            "of the bound": f"{r['tokens_per_s'] / min(bounds):.2f} {binds(r)}" if bounds else "",
            **{f"{key.replace('_', ' ')} MB": f"{r[f'{key}_nbytes'] / 1e6:.0f}" for key in (
                "peak", "objects", "cached", "resident", "group", "step_read") if f"{key}_nbytes" in r},
            "of plain reads": f"{r['link_share']:.0%}" if "link_share" in r else "",
            "error %": " ".join(f"{100 * r[k]:+.0f}" for k in ("step_error", "prefill_error") if k in r),
            "as in RAM": f"{r['same_tokens']:.0%}" if "same_tokens" in r else "", "hits (expected)": r.get("hits", "")}
