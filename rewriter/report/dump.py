"""FOREBAY_DUMP: numbered graphs before and after each pass, the plan, and the Program as text."""

from __future__ import annotations

from pathlib import Path

from torch import fx

from forebay.rewriter.ir.draft import Draft, Fetch, Store, Vacant
from forebay.rewriter.ir.plan import Plan
from forebay.rewriter.ir.program import (
    Copy,
    FileSlice,
    Item,
    Launch,
    Program,
    Record,
    Release,
    Rows,
    Span,
    Wait,
    place_of,
)


class Dump:
    """Writes into `folder`/`phase`; does nothing when `folder` is empty."""

    def __init__(self, folder: str, phase: str) -> None:
        self.folder = Path(folder) / phase if folder else None
        self.number = 0
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)

    def before(self, gm: fx.GraphModule, name: str) -> None:
        self._write(gm, f"{name}.before")

    def after(self, gm: fx.GraphModule, name: str) -> None:
        self._write(gm, f"{name}.after")
        self.number += 1

    def _write(self, gm: fx.GraphModule, stage: str) -> None:
        if self.folder is not None:
            (self.folder / f"{self.number:02d}_{stage}.py").write_text(graph_text(gm), encoding="utf-8")

    def draft(self, draft: Draft, name: str) -> None:
        if self.folder is not None:
            (self.folder / f"{self.number:02d}_{name}.txt").write_text(draft_text(draft), encoding="utf-8")
        self.number += 1

    def program(self, program: Program) -> None:
        if self.folder is not None:
            (self.folder / "program.txt").write_text(program_text(program), encoding="utf-8")

    def plan(self, plan: Plan) -> None:
        if self.folder is not None:
            plan.save(self.folder / "plan.json")


def graph_text(gm: fx.GraphModule) -> str:
    """The graph as Python, with shapes and what made each node; below it the block graphs that it calls."""
    lines = []
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        shape = f"{str(value.dtype)[6:]}{list(value.shape)}" if hasattr(value, "shape") else ""
        made_by = f"  by {node.meta['made_by']}" if "made_by" in node.meta else ""
        mark = node.meta.get("forebay")
        lines.append(f"{node.format_node() or node.name}  # {shape}{made_by}{f'  {mark}' if mark else ''}")
    blocks = dict.fromkeys(str(call.target) for call in gm.graph.find_nodes(op="call_module"))
    below = [f"\n# {name}\n{graph_text(gm.get_submodule(name))}" for name in blocks]  # type: ignore[arg-type]
    return "\n".join(lines) + "\n" + "".join(below)


def program_text(program: Program) -> str:
    """One line per item: stream, what, where."""
    files = f"; spill files {program.files}" if program.files else ""
    lines = [f"# {program.name}; arenas {program.arenas}{files}", "# prologue"]
    lines += [item_text(item) for item in program.prologue]
    lines.append("# step")
    lines += [item_text(item) for item in program.step]
    return "\n".join(lines) + "\n"


def draft_text(draft: Draft) -> str:
    """One line per launch and mark; marks of copies by number, with the copied bytes where one is issued."""
    lines = [f"prologue {draft.prologue}"]
    for item in draft.items:
        if isinstance(item, Launch):
            lines.append(f"launch    {item.label}")
            continue
        if isinstance(item, Release):
            lines.append(f"release   {item.span.buffer}")
            continue
        label = f"{item.ring}{item.slot}" if isinstance(item, Vacant) else getattr(item, "label", "")
        if isinstance(item, Fetch | Store):
            label = (draft.moves if isinstance(item, Fetch) else draft.stores)[item.index].label
        lines.append(f"{type(item).__name__} {getattr(item, 'index', '')}   {label.removeprefix('fetch ')}".rstrip())
    return "\n".join(lines) + "\n"


def item_text(item: Item) -> str:
    """One item on one line."""
    if isinstance(item, Launch):
        impl = f" ({item.impl})" if item.impl else ""
        writes = ", ".join(map(_span, item.writes))
        return f"{item.stream:8} launch {item.label}: {item.op}{impl} -> {writes}"
    if isinstance(item, Copy):
        return f"{item.stream:8} copy   {item.label}: {_end(item.src)} -> {_end(item.dst)}"
    if isinstance(item, Record | Wait):
        return f"{item.stream:8} {'record' if isinstance(item, Record) else 'wait  '} event {item.event}"
    assert isinstance(item, Release)
    return f"{item.stream:8} free   {_span(item.span)}"


def _end(end: FileSlice | Rows | Span) -> str:
    """An end of a copy, and what says which rows of it are moved."""
    place = place_of(end)
    text = _span(place) if isinstance(place, Span) else f"{Path(place.path).name}[{place.offset}:+{place.nbytes}]"
    if isinstance(end, Rows):
        named = f" named by {end.index.buffer}" if end.index is not None else ""
        text += f" rows of {end.row_nbytes}{named}" + (f", the first {end.count.buffer}" if end.count else "")
    return text


def _span(span: Span) -> str:
    return f"{span.buffer}@{span.arena}[{span.offset}:+{span.nbytes}]"
