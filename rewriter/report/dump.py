"""FOREBAY_DUMP: numbered graphs before and after each pass, the plan, and the Program as text."""

from __future__ import annotations

from pathlib import Path

from torch import fx

from forebay.rewriter.ir.plan import Plan
from forebay.rewriter.ir.program import Copy, FileRows, FileSlice, Item, Launch, Program, Record, Release, Span, Wait


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
    lines = [f"# {program.name}; arenas {program.arenas}", "# prologue"]
    lines += [item_text(item) for item in program.prologue]
    lines.append("# step")
    lines += [item_text(item) for item in program.step]
    return "\n".join(lines) + "\n"


def item_text(item: Item) -> str:
    """One item on one line."""
    if isinstance(item, Launch):
        impl = f" ({item.impl})" if item.impl else ""
        writes = ", ".join(map(_span, item.writes))
        return f"{item.stream:8} launch {item.label}: {item.op}{impl} -> {writes}"
    if isinstance(item, Copy):
        if isinstance(item.src, Span):
            source = _span(item.src)
        elif isinstance(item.src, FileRows):
            source = f"{Path(item.src.path).name} rows named by {item.src.index.buffer}"
        else:
            assert isinstance(item.src, FileSlice)
            source = f"{Path(item.src.path).name}[{item.src.offset}:+{item.src.nbytes}]"
        return f"{item.stream:8} copy   {item.label}: {source} -> {_span(item.dst)}"
    if isinstance(item, Record | Wait):
        return f"{item.stream:8} {'record' if isinstance(item, Record) else 'wait  '} event {item.event}"
    assert isinstance(item, Release)
    return f"{item.stream:8} free   {_span(item.span)}"


def _span(span: Span) -> str:
    return f"{span.buffer}@{span.arena}[{span.offset}:+{span.nbytes}]"
