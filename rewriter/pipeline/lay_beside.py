"""Lay a draft's step into the memory of a model's plan: what both have is shared, what is its own lies above."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from forebay.rewriter.ir.alignment import PAGE_NBYTES, aligned, whole_pages
from forebay.rewriter.ir.plan import BufferPlacement, Limits, Plan, PlanError, Prediction, WeightPlacement
from forebay.rewriter.ir.program import DEVICE, Copy, Item, Launch, Program, Record, Span, Wait
from forebay.rewriter.verify.items import copy_spans

EVENTS = 1 << 20  # events of the draft begin here, so that none is one of the model's, which copies under way complete


def laid_beside(draft: Plan, model: Plan, looked_up: Collection[str], rows_nbytes: int, limits: Limits) -> Plan:
    """The plan of a draft's step, of one token and with all on the device, in the memory of `model`'s plan within
    `limits`: the cache, the constants and the weights that are resident there lie where they lie, those `looked_up` by
    row stay on the model's tier, and all others, with the activations, above the model's arena. Rows that pass through
    host memory do so where the model's do, in `rows_nbytes` of it."""
    there = {b.name: b for b in model.buffers if b.phase in ("all", "decode") and b.kind != "activation"}
    weights = tuple(_placed(w, model, looked_up) for w in draft.weights)
    gone = {w.name for w in weights if w.gather}
    shared = gone | {w.name for w in weights if model.weight(w.name).tier == DEVICE}
    top = whole_pages(model.arenas[DEVICE])
    moving = [b for b in draft.buffers if b.kind in ("activation", "io")]
    lowest = min((b.offset for b in moving), default=0) // PAGE_NBYTES * PAGE_NBYTES
    buffers = [replace(b, offset=top + b.offset - lowest) for b in moving]
    top = aligned(max((b.offset + b.nbytes for b in buffers), default=top))
    for b in draft.buffers:
        if b.kind in ("activation", "io") or (b.name in gone and b.name not in there):  # then it is on the disk
            continue
        if b.kind in ("cache", "constant") or b.name in shared:
            at = there[b.name]
            buffers.append(replace(b, arena=at.arena, offset=at.offset))
        else:
            buffers.append(replace(b, offset=top))
            top = aligned(top + b.nbytes)
    if "host_rows" in there and gone:
        buffers.append(replace(there["host_rows"], nbytes=rows_nbytes))
    arenas = {**{tier: n for tier, n in model.arenas.items() if tier != DEVICE}, DEVICE: top}
    return replace(draft, budget=limits, weights=weights, buffers=tuple(buffers), arenas=arenas,
                   prediction=Prediction())


def _placed(w: WeightPlacement, model: Plan, looked_up: Collection[str]) -> WeightPlacement:
    tier = model.weight(w.name).tier
    return replace(w, tier=tier, gather=True) if w.name in looked_up and tier != DEVICE else w


def apart(program: Program) -> Program:
    """The program with events of its own."""
    assert not program.prologue and not program.files

    def moved(item: Item) -> Item:
        if isinstance(item, Record):
            return Record(item.stream, item.event + EVENTS)
        return Wait(item.stream, item.event + EVENTS) if isinstance(item, Wait) else item

    return replace(program, step=tuple(map(moved, program.step)))


def check_beside(program: Program, draft: Plan, model: Plan) -> None:
    """PlanError where a draft's step would write what is the model's, its cache apart, or takes for resident what the
    model's plan has elsewhere."""
    cache = {b.name: b for b in model.buffers if b.kind == "cache" and b.phase in ("all", "decode")}
    free = [b for b in model.buffers if b.arena != DEVICE and b.name == "host_rows"]
    for span in _written(program):
        if span.offset >= model.arenas.get(span.arena, 0):
            continue
        if not any(_within(span, b) for b in (*cache.values(), *free)):
            raise PlanError(f"draft: its step would write [{span.offset}:+{span.nbytes}] of the {span.arena}, "
                            f"{span.buffer}, where the model has something else")
    always = (b for b in model.buffers if b.phase == "all")
    kept = {(b.name, b.arena, b.offset, b.nbytes) for b in (*always, *cache.values())}
    for b in draft.buffers:
        low = b.offset < model.arenas.get(b.arena, 0) and b.kind in ("weight", "constant", "cache")
        if low and (b.name, b.arena, b.offset, b.nbytes) not in kept:
            raise PlanError(f"draft: {b.name} is not where the model's plan has it")


def _written(program: Program) -> Iterator[Span]:
    for item in program.step:
        if isinstance(item, Launch):
            yield from item.writes
        elif isinstance(item, Copy):
            yield from copy_spans(item)[1]


def _within(span: Span, b: BufferPlacement) -> bool:
    return span.arena == b.arena and b.offset <= span.offset and span.offset + span.nbytes <= b.offset + b.nbytes
