"""A plan as text: predicted speed and advice, budget, schedule, a row per layer, and the contents of each arena."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forebay.rewriter.ir.byte_sizes import format_nbytes
from forebay.rewriter.ir.durations import format_seconds
from forebay.rewriter.ir.meeting import meeting_of
from forebay.rewriter.ir.plan import BufferPlacement, Plan, WeightPlacement, Workload
from forebay.rewriter.ir.prefill_chunks import chunk_steps
from forebay.rewriter.ir.printable import printable
from forebay.rewriter.ir.program import ATTEND, DISK, LOOKUP, RETURN, UPLOAD
from forebay.rewriter.ir.schedule.routed_fetch import POOL
from forebay.rewriter.planning.features.table import FEATURES
from forebay.rewriter.predict.simulate import CORES

if TYPE_CHECKING:
    from forebay.rewriter.ir.graph import CapturedModel

KIND_LETTERS = {"weight": "W", "constant": "C", "slot": "S", "cache": "K", "pool": "E", "routing": "r",
                "activation": "a", "io": "i", "workspace": "x"}
COLUMNS = {"weights": "weights", "bytes": "nbytes", "resident": "resident", "from host": "from_host",
           "from disk": "from_disk", "by row": "by_row", "in place": "in_place", "copies": "copies"}
BOUND_BY = {CORES: "the cores, which compute and bear a share of the disk's copies"}
OUTSIDE = -1  # the layer number of weights that belong to no layer
TIMELINE_COLUMNS, TIMELINE_ROWS = 72, 16


@dataclass(frozen=True)
class LayerRow:
    """Bytes of one layer's weights: kept on the device, streamed every step (from host, from disk), read by row, and in
    place in host memory. `copies` stream it (0: a plan alone does not tell). `title`: the layer's or weight's name.
    """

    title: str
    weights: int
    nbytes: int
    resident: int
    from_host: int
    from_disk: int
    by_row: int
    copies: int
    formats: tuple[str, ...]
    in_place: int = 0


def explain_plan(
    plan: Plan, captured: CapturedModel | None = None, advice: Sequence[str] = (), *, brief: bool = False
) -> str:
    """Format the whole plan as plain text of at most 140 columns, predicted speed and `advice` first.

    `captured` gives the exact layers instead of their numbers in the weights' names, and the rows of each matrix. A
    `brief` table has one row for neighboring layers of one size.
    """
    parts = [_answer(plan, advice), _head(plan, captured), _table(layer_rows(plan, captured), brief), _arenas(plan)]
    return printable("\n\n".join(part for part in parts if part))


def summarise_plan(plan: Plan, captured: CapturedModel | None = None, advice: Sequence[str] = ()) -> str:
    """The plan as text without the row per layer."""
    parts = (_answer(plan, advice), _head(plan, captured), _arenas(plan))
    return printable("\n".join(part for part in parts if part))


def _answer(plan: Plan, advice: Sequence[str]) -> str:
    lines = [f"{'advice' if i == 0 else '':<12}{line}" for i, line in enumerate(advice)]
    return "\n".join(part for part in (_prediction(plan), *lines) if part)


def table_cells(rows: Sequence[LayerRow], *, brief: bool) -> list[list[str]]:
    """Return the cells of the table: titles, a line for each group of equal neighbors (`0-29 x30`), and totals.

    Neighbors are equal if they differ in their number alone. In a `brief` table also where only their placement
    differs, which is then a range (`10.0..25.0 MiB`).
    """
    sums = {name: sum(getattr(r, name) for r in rows) for name in COLUMNS.values()}
    shown = {title: name for title, name in COLUMNS.items() if sums[name] or name in ("resident", "from_disk")}
    lines = [["layer", *shown, "format"]]
    for group in _groups(rows, brief):
        title = group[0].title if len(group) == 1 else f"{group[0].title}-{group[-1].title} x{len(group)}"
        cells = (_range(name, [getattr(row, name) for row in group]) for name in shown.values())
        lines.append([title, *cells, "+".join(group[0].formats)])
    return [*lines, ["total", *(_cell(name, sums[name]) for name in shown.values()), ""]]


def _groups(rows: Sequence[LayerRow], brief: bool) -> list[list[LayerRow]]:
    """Group layers with their equal neighbors."""
    def key(row: LayerRow) -> object:
        return (row.weights, row.nbytes, row.formats) if brief else replace(row, title="")

    groups: list[list[LayerRow]] = []
    for row in rows:
        same = groups and row.title.isdigit() and key(groups[-1][-1]) == key(row)
        groups[-1].append(row) if same else groups.append([row])
    return groups


def layer_rows(plan: Plan, captured: CapturedModel | None = None) -> list[LayerRow]:
    """One row per layer in order, then one per weight outside the layers."""
    number = layer_numbers([w.name for w in plan.weights], captured)
    layers: dict[int, list[WeightPlacement]] = {}
    for w in plan.weights:
        layers.setdefault(number[w.name], []).append(w)
    inside = [_row(str(i), layers[i], captured) for i in sorted(layers) if i != OUTSIDE]
    return inside + [_row(w.name, [w], captured) for w in layers.get(OUTSIDE, [])]


def layer_numbers(names: Iterable[str], captured: CapturedModel | None = None) -> dict[str, int]:
    """The layer each weight belongs to: the first number between dots in its name; OUTSIDE without one."""
    if captured is not None:
        known = {weight: i for i, weights in enumerate(captured.layer_weights) for weight in weights.values()}
        return {name: known.get(name, OUTSIDE) for name in names}
    found = {}
    for name in names:
        match = re.search(r"(?:^|\.)(\d+)(?=\.)", name)
        found[name] = int(match[1]) if match else OUTSIDE
    return found


def _row(title: str, weights: Sequence[WeightPlacement], captured: CapturedModel | None) -> LayerRow:
    streamed = [w for w in weights if w.streams and not (w.gather and not w.tile_rows)]
    copies = 0
    if captured is not None:
        copies = sum(-(-captured.weights[w.name].shape[0] // w.tile_rows) if w.tile_rows else 1 for w in streamed)
    return LayerRow(
        title, len(weights), sum(w.nbytes for w in weights),
        resident=sum(w.nbytes for w in weights if w.tier == "device"),
        in_place=sum(w.nbytes for w in weights if w.in_place),
        from_host=sum(w.nbytes for w in streamed if w.tier == "host"),
        from_disk=sum(w.nbytes for w in streamed if w.tier == "disk"),
        by_row=sum(w.nbytes for w in weights if w.gather and not w.tile_rows),
        copies=copies, formats=tuple(sorted({w.format for w in weights})))


def _head(plan: Plan, captured: CapturedModel | None) -> str:
    b, w, s, p = plan.budget, plan.workload, plan.schedule, plan.prediction
    passes = sum(chunk_steps(w.prompt, s.prefill_chunks).values())
    total = sum(x.nbytes for x in plan.weights)
    on_device = plan.nbytes_on("device")
    host = "no limit" if b.host is None else format_nbytes(b.host) if b.host else "none"
    lines = [
        ("model", f"fingerprint {plan.fingerprint}"),
        ("machine", plan.machine or "not named"),
        ("budget", f"device {format_nbytes(b.device)}, host {host}"),
        ("workload", f"batch {w.batch}, prompt {w.prompt} tokens, {w.new_tokens} new tokens: "
                     f"{w.context} cache positions per sequence, {_kept(plan, captured)}" + _typical(w)),
        ("weights", f"{format_nbytes(total)}: {format_nbytes(on_device)} stay in device memory"
                    + (f" ({100 * on_device / total:.0f} %)" if total else "")
                    + f", {format_nbytes(p.streamed_nbytes)} stream per decode step"),
        ("schedule", _schedule(plan)),
        ("prefill", f"chunks of {s.prefill_chunk} tokens, {passes} pass{'es' if passes > 1 else ''} over the weights"
                    + (f"; {s.batching.admitted} admitted at once as slots fall free" if s.batching.admitted else "")),
        *(row for feature in FEATURES if (row := feature.explain(plan)) is not None),
        *([("experts", _experts(plan))] if s.routed.steps else []),
        *([("softmax", _shared_maxima(plan))] if plan.score_ranges else []),
    ]
    return "\n".join(f"{name:<10}{text}" for name, text in lines)


def _kept(plan: Plan, captured: CapturedModel | None) -> str:
    """Format the bytes of the cache, and of states that do not grow with the context."""
    cache = sum(x.nbytes for x in plan.buffers_of("decode") if x.kind == "cache")
    states = 0 if captured is None else plan.workload.batch * sum(
        spec.sequence_nbytes for layer in captured.states for spec in layer)
    saved = captured is not None and plan.schedule.speculative_steps and not captured.rewindable
    found = [f"{format_nbytes(states)} of states" + (", twice for drafts" if saved else "")] if states else []
    cache -= 2 * states if saved else states
    found += [f"{format_nbytes(cache)} of cache"] if cache > 0 or not states else []
    return " and ".join(found)


def _experts(plan: Plan) -> str:
    """Return the experts that pools hold, what a decode step is to find there and to read, and those of the CPU."""
    tables, routed, p = [w for w in plan.weights if w.pool_slots], plan.schedule.routed, plan.prediction
    on_host = list(_host_experts(plan))
    if not tables:
        return f"\n{'':<10}".join(on_host)
    pools, all_ = (sum(x.nbytes for x in of) for of in ([b for b in plan.buffers if b.name.endswith(POOL)], tables))
    how = "measured" if routed.measured else "assumed"
    why = "on the prompts of the calibration" if routed.measured else "if the router picks all equally often"
    lines = [f"{tables[0].pool_slots} of each of {len(tables)} layers stay in pools of {format_nbytes(pools)} "
             f"({100 * pools / all_:.0f} %)", "decode steps read the missing ones of the experts that the router picks",
             *([f"{routed.ahead} of each layer are read before its router has picked"] if routed.ahead else []),
             f"{how}: {100 * routed.hit_rate:.0f} % are there, {why}", *on_host]
    on_disk = any(w.tier == "disk" for w in tables)
    for lane, streams in (("disk", (LOOKUP, DISK) if on_disk else ()), ("link", (RETURN, UPLOAD))):
        if busy_s := sum(p.busy_time_s.get(stream, 0.0) for stream in streams):
            lines.append(f"the {lane} takes {format_seconds(busy_s)} of a step, which reads "
                         f"{format_nbytes(p.streamed_nbytes)}: at most {plan.workload.batch / busy_s:.3g} tokens/s")
    return f"\n{'':<10}".join(lines)


def _host_experts(plan: Plan) -> Iterator[str]:
    """With which experts the host computes, and how long."""
    there, busy_s = [w for w in plan.weights if w.on_host], plan.prediction.busy_time_s.get(ATTEND, 0.0)
    if there:
        yield (f"the CPU computes those of {len(there)} layers in decode steps, where "
               f"{format_nbytes(sum(w.nbytes for w in there))} of them lie in host memory")
    if there and busy_s:
        yield f"the CPU takes {format_seconds(busy_s)} of a step: at most {plan.workload.batch / busy_s:.3g} tokens/s"


def _typical(work: Workload) -> str:
    """The lengths that times are of, where not all are alike."""
    prompt, answer = work.typical
    alike = (prompt, answer) == (work.prompt, work.new_tokens)
    return "" if alike else f"; times are for typical lengths, {prompt} and {answer} tokens"


def _shared_maxima(plan: Plan) -> str:
    """Return which layers share a maximum, neighbours together."""
    layers = sorted(r.layer for r in plan.score_ranges)
    begins = [layer for layer in layers if layer - 1 not in layers]
    ends = [layer for layer in layers if layer + 1 not in layers]
    told = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in zip(begins, ends, strict=True))
    return f"on a GPU partial softmaxes of decode attention share a maximum in layers {told}"


def _schedule(plan: Plan) -> str:
    s = plan.schedule
    if not s.slot_nbytes:
        text = f"{'host memory is read in place' if plan.in_place else 'all weights resident'}, no staging slots"
    else:
        slots = "1 staging slot" if s.slots == 1 else f"{s.slots} staging slots"
        text = f"{slots} of {format_nbytes(s.slot_nbytes)}, copies issued {s.lead} ahead"
        if s.host_hop:
            text += ", disk reads by way of host memory"
    parts = s.batching.micro_batches
    if parts.count > 1:
        text += f"; {parts.count} micro-batches of {plan.workload.batch // parts.count}, {parts.order} order"
    return text


def _table(rows: Sequence[LayerRow], brief: bool) -> str:
    if not rows:
        return ""
    lines = table_cells(rows, brief=brief)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    left = (0, len(widths) - 1)
    return "\n".join("  ".join(
        c.ljust(n) if i in left else c.rjust(n) for i, (c, n) in enumerate(zip(line, widths, strict=True))
    ).rstrip() for line in lines)


def _cell(name: str, value: int) -> str:
    return "-" if not value else str(value) if name in ("weights", "copies") else format_nbytes(value)


def _range(name: str, values: Sequence[int]) -> str:
    """Format the least and the largest of some values, or the one that they all have."""
    low, high = _cell(name, min(values)), _cell(name, max(values))
    if low == high:
        return low
    number, _, unit = low.partition(" ")
    if not min(values):
        return f"0..{high}"
    return f"{number if unit and high.endswith(f' {unit}') else low}..{high}"


def _arenas(plan: Plan) -> str:
    lines = []
    for arena, nbytes in plan.arenas.items():
        kinds = kind_nbytes(plan, arena)
        text = ", ".join(f"{kind} {format_nbytes(n)}" for kind, n in kinds.items())
        lines.append(f"{arena} arena  {format_nbytes(nbytes)}: {text}")
        lines += _meeting(plan, arena)
    return "\n".join(lines)


def _meeting(plan: Plan, arena: str) -> list[str]:
    """Format the room between cache and activations of each phase, which grow towards each other."""
    meeting = meeting_of(plan)
    moving = phases(plan, arena)
    if arena != "device" or meeting is None or "decode" not in moving:
        return []
    lines = [f"decode     cache below byte {meeting.cache_top:,}, activations above byte {meeting.activation_base:,}: "
             f"room for {meeting.tokens:,} tokens per sequence"]
    if plan.prefill_overlays_kv_cache and "prefill" in moving:
        top = max(b.offset + b.nbytes for b in lasting(plan, arena, "prefill"))
        base = min(b.offset for b in moving["prefill"])
        lent = max(0, meeting.cache_top - base)
        lines.append(f"prefill    cache below byte {top:,}, activations above byte {base:,}: {format_nbytes(lent)} of "
                     "activations overlay the later cache")
    return lines


def lasting(plan: Plan, arena: str, phase: str = "decode") -> list[BufferPlacement]:
    """The buffers of an arena that live throughout a phase, by address."""
    found = [b for b in plan.buffers_of(phase) if b.arena == arena and b.nbytes
             and (b.phase == "all" or b.kind == "cache")]
    return sorted(found, key=lambda b: b.offset)


def kind_nbytes(plan: Plan, arena: str) -> dict[str, int]:
    """Bytes of an arena by kind of buffer. Those that live throughout are added up; all that come and go, inputs and
    outputs among them, share one stretch of addresses, which counts once, as activations, where it is not cache later.
    """
    found: dict[str, int] = {}
    fixed = lasting(plan, arena)
    for b in fixed:
        found[b.kind] = found.get(b.kind, 0) + b.nbytes
    moving = [b for buffers in phases(plan, arena).values() for b in buffers]
    if moving:
        low = min(b.offset for b in moving)
        if plan.prefill_overlays_kv_cache:
            low = max(low, *(b.offset + b.nbytes for b in fixed))
        found["activation"] = found.get("activation", 0) + max(b.offset + b.nbytes for b in moving) - low
    return found


def _prediction(plan: Plan) -> str:
    p = plan.prediction
    if not p.decode_time_s:
        return ""
    lines = [
        f"expected    prefill {format_seconds(p.prefill_time_s)}, then {format_seconds(p.decode_time_s)} per decode "
        f"step: {plan.workload.batch / p.decode_time_s:.3g} tokens/s",
        "busy        " + ", ".join(f"{stream} {format_seconds(t)}" for stream, t in p.busy_time_s.items())
        + f" per decode step; the bottleneck is {BOUND_BY.get(p.bottleneck, p.bottleneck)}",
        "peak        " + ", ".join(f"{tier} {format_nbytes(n)}" for tier, n in p.peak_nbytes.items()),
    ]
    return "\n".join(lines)


def phases(plan: Plan, arena: str = "device") -> dict[str, list[BufferPlacement]]:
    """The buffers of an arena that come and go, by phase, in the plan's order."""
    found: dict[str, list[BufferPlacement]] = {}
    for b in plan.buffers:
        if b.arena == arena and b.phase != "all" and b.kind != "cache" and b.nbytes:
            found.setdefault(b.phase, []).append(b)
    return found


def memory_timeline(plan: Plan, arena: str = "device") -> str:
    """The arena as a coarse character picture: what lives throughout as a list of address ranges, and for each phase
    addresses (upwards) over the steps of the graph (rightwards), a letter per kind of buffer and '.' for free."""
    lines = [f"{arena} arena, {format_nbytes(plan.arenas.get(arena, 0))}"]
    early = [b for b in lasting(plan, arena, "prefill") if b.phase == "prefill"]
    for buffers, note in ((early, " during prefill"), (lasting(plan, arena), "")):
        for start, end, kind, count in _runs(buffers):
            lines.append(f"  {start:>14,} .. {end:>14,}  {KIND_LETTERS[kind]} {kind}: {count}, "
                         f"{format_nbytes(end - start)}{note}")
    for phase, buffers in phases(plan, arena).items():
        lines += ["", *_picture(phase, buffers)]
    used = dict.fromkeys(b.kind for b in plan.buffers if b.arena == arena)
    lines += ["", "letters: " + ", ".join(f"{KIND_LETTERS[kind]} {kind}" for kind in used) + ", . free"]
    return "\n".join(lines)


def _runs(buffers: Sequence[BufferPlacement]) -> list[tuple[int, int, str, int]]:
    """Neighbours of one kind joined: (start, end, kind, count)."""
    runs: list[tuple[int, int, str, int]] = []
    for b in buffers:
        if runs and runs[-1][2] == b.kind:
            start, end, kind, count = runs[-1]
            runs[-1] = (start, max(end, b.offset + b.nbytes), kind, count + 1)
        else:
            runs.append((b.offset, b.offset + b.nbytes, b.kind, 1))
    return runs


def _picture(phase: str, buffers: Sequence[BufferPlacement]) -> list[str]:
    low, high = min(b.offset for b in buffers), max(b.offset + b.nbytes for b in buffers)
    steps = max(b.last for b in buffers) + 1
    columns, rows = min(TIMELINE_COLUMNS, steps), TIMELINE_ROWS
    cells = [["."] * columns for _ in range(rows)]
    for b in buffers:
        first, last = b.first * columns // steps, b.last * columns // steps
        bottom, top = (b.offset - low) * rows // (high - low), -(-(b.offset + b.nbytes - low) * rows // (high - low))
        for y in range(bottom, top):
            for x in range(first, last + 1):
                cells[y][x] = KIND_LETTERS[b.kind]
    live = peak_nbytes(buffers)
    lines = [f"{phase}: {len(buffers)} buffers over {steps} steps, {format_nbytes(high - low)} of addresses, "
             f"at most {format_nbytes(live)} live at once"]
    for y in reversed(range(rows)):
        edge = f"{low + (y + 1) * (high - low) // rows:>14,}" if y in (rows - 1, 0) else " " * 14
        lines.append(f"{edge} |{''.join(cells[y])}|")
    return lines


def peak_nbytes(buffers: Sequence[BufferPlacement]) -> int:
    """The most bytes of `buffers` that are live in any one step."""
    change: dict[int, int] = {}
    for b in buffers:
        change[b.first] = change.get(b.first, 0) + b.nbytes
        change[b.last + 1] = change.get(b.last + 1, 0) - b.nbytes
    return _running_peak(change)


def _running_peak(change: Mapping[int, int]) -> int:
    live = peak = 0
    for step in sorted(change):
        live += change[step]
        peak = max(peak, live)
    return peak
