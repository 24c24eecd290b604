"""Facts about a step graph that the planner needs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from forebay.kernels.operators import EXPERTS
from forebay.rewriter.ir.graph import META, storage_of, weight_name
from forebay.rewriter.ir.products import experts_among, reads_table, tileable
from forebay.rewriter.planning.model_needs import WeightUse
from forebay.rewriter.predict.closed_form import StepProduct

aten = torch.ops.aten


@dataclass(frozen=True)
class _Reading:
    """How one graph consumes one of its placeholders: where in its order first, by lookups, by other operators, whether
    all of the others accept row tiles, the most rows that one of them multiplies by it, and of a table of experts
    how many each row picks, from how many, and how many numbers an expert gives."""

    first: int
    lookup: bool
    product: bool
    tiles: bool
    rows: int = 0
    picks: int = 0
    among: int = 0
    outputs: int = 0


def weight_uses(step: fx.GraphModule, constants: set[str]) -> list[WeightUse]:
    """Every weight of a step graph and how it is consumed, in the order in which a step first multiplies by it."""
    order = {node: i for i, node in enumerate(step.graph.nodes)}
    tokens = next((n.meta["val"].numel() for n in order if n.target == "input_ids"), 0)
    blocks: dict[object, list[_Reading | None]] = {}
    found: list[tuple[tuple[int, int], WeightUse]] = []
    for node in step.graph.find_nodes(op="placeholder"):
        name = weight_name(node)
        if name is None or name in constants:
            continue
        readings: list[tuple[tuple[int, int], _Reading]] = []
        own = _reading(node, order)
        if own is not None:
            readings.append(((own.first, 0), own))
        for call in node.users:
            if call.op == "call_module":
                if call.target not in blocks:
                    blocks[call.target] = _readings(step.get_submodule(str(call.target)))  # type: ignore[arg-type]
                for arg, reading in zip(call.args, blocks[call.target], strict=True):
                    if arg is node and reading is not None:
                        readings.append(((order[call], reading.first), reading))
        products = [at for at, r in readings if r.product]
        first = min(products or [at for at, _ in readings], default=(0, 0))
        value = node.meta["val"]
        rows = value.shape[0] if value.dim() else 1
        tiles = value.dim() == 2 and all(r.tiles for _, r in readings)
        nbytes = value.numel() * value.element_size()
        share, outputs, picks = _picked([r for _, r in readings])
        found.append((first, WeightUse(name, nbytes, rows, tiles, any(r.lookup for _, r in readings), bool(products),
                                       format=node.meta[META].format, dtype=str(value.dtype)[6:],
                                       layers=tuple(call.meta["layer"] for call in node.users
                                                    if call.op == "call_module"),
                                       more_rows=max(0, max((r.rows for _, r in readings), default=0) - tokens),
                                       share=share, outputs=outputs, picks=picks)))
    return [use for _, use in sorted(found, key=lambda pair: pair[0])]


def read_by_both(uses: Sequence[WeightUse], others: Sequence[WeightUse]) -> list[WeightUse]:
    """The weights of a step as another one reads them too: in tiles where both can."""
    tiled = {use.name for use in others if use.tileable}
    return [replace(use, tileable=use.tileable and use.name in tiled) for use in uses]


def read_together(step: fx.GraphModule) -> tuple[frozenset[str], ...]:
    """The sets of two or more weights that one operator of a step graph or of its blocks reads as a whole."""
    found = dict.fromkeys(_read_together(step, {n: weight_name(n) for n in step.graph.find_nodes(op="placeholder")}))
    for call in step.graph.find_nodes(op="call_module"):
        block: Any = step.get_submodule(str(call.target))
        named: Any = zip(block.graph.find_nodes(op="placeholder"), call.args, strict=True)
        found |= dict.fromkeys(_read_together(block, {n: weight_name(given) for n, given in named}))
    return tuple(found)


def _read_together(graph: fx.GraphModule, names: Mapping[fx.Node, str | None]) -> Iterator[frozenset[str]]:
    for node in graph.graph.nodes:
        if node.op in ("call_function", "output") and node.meta.get("alias_of") is None:
            read = node.all_input_nodes[1:] if node.target is aten.embedding.default else node.all_input_nodes
            weights = frozenset(filter(None, (names.get(storage_of(n)[0]) for n in read)))
            if len(weights) > 1:
                yield weights


def weight_products(uses: Sequence[WeightUse]) -> list[StepProduct]:
    """The products that a step makes with weights of two dimensions. Packed rows hold, per group, a scale and a low of
    16 bits."""
    found = []
    for u in uses:
        if not u.product or u.rows < 2:
            continue
        packed = re.fullmatch(r"w([48])g(\d+)", u.format)
        kind = u.format if packed else u.dtype
        bits = int(packed[1]) + 32 / int(packed[2]) if packed else 8 * getattr(torch, u.dtype).itemsize
        columns = max(1, round(8 * u.nbytes / u.rows / bits))
        found.append(StepProduct(kind, u.rows, columns, u.nbytes, u.more_rows, u.share))
    return found


def launch_count(step: fx.GraphModule) -> int:
    """Launches of a step graph with its blocks: operators whose result has memory of its own."""
    blocks: dict[object, int] = {}
    found = 0
    for node in step.graph.nodes:
        if node.op == "call_module":
            if node.target not in blocks:
                blocks[node.target] = launch_count(step.get_submodule(str(node.target)))  # type: ignore[arg-type]
            found += blocks[node.target]
        found += node.op == "call_function" and node.meta.get("alias_of") is None
    return found


def _readings(block: fx.GraphModule) -> list[_Reading | None]:
    order = {node: i for i, node in enumerate(block.graph.nodes)}
    return [_reading(node, order) for node in block.graph.find_nodes(op="placeholder")]


def _reading(node: fx.Node, order: dict[fx.Node, int]) -> _Reading | None:
    """Return how a graph's own operators, not the blocks it calls, consume a placeholder; None if they do not."""
    users = [u for u in node.users if u.op != "call_module"]
    lookups = [u for u in users if u.target is aten.embedding.default and u.args[0] is node]
    others = [u for u in users if u not in lookups]
    if not users:
        return None
    first = min(order[u] for u in others or lookups)
    rows = max((u.meta["val"].numel() // max(1, u.meta["val"].shape[-1]) for u in others if tileable(u, node)),
               default=0)
    tables = [u for u in others if reads_table(u, node)]
    chosen = [EXPERTS.argument(u.args, "index").meta["val"].shape[-1] for u in tables]
    picks = max(chosen) if chosen and len(chosen) == len(others) else 0
    among = experts_among(node).get("among", node.meta["val"].shape[0]) if picks else 0
    outputs = max((u.meta["val"].shape[-1] for u in tables), default=0)
    return _Reading(first, bool(lookups), bool(others), all(tileable(u, node) for u in others), rows, picks, among,
                    outputs)


def _picked(readings: Sequence[_Reading]) -> tuple[float, int, int]:
    """Return the share of a weight that each row uses, the size of an expert's result, and the experts that a row may
    pick."""
    outputs = max((r.outputs for r in readings), default=0)
    if not all(r.picks for r in readings):
        return 1.0, outputs, 0
    return max((r.picks / r.among for r in readings), default=1.0), outputs, max((r.picks for r in readings), default=0)
