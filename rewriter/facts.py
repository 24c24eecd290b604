"""What the planner needs to know, read off a flat graph."""

from __future__ import annotations

import math

import torch
from torch import fx

from forebay.passes.insert_transfers import tileable
from forebay.rewriter.graph import META, CacheInput, weight_name
from forebay.rewriter.planner import WeightUse

aten = torch.ops.aten


def weight_uses(flat: fx.GraphModule, constants: set[str]) -> list[WeightUse]:
    """Every weight of a flat graph and how it is consumed, in the order in which a step first multiplies by it."""
    order = {node: i for i, node in enumerate(flat.graph.nodes)}
    found: list[tuple[int, WeightUse]] = []
    for node in flat.graph.nodes:
        name = weight_name(node) if node.op == "placeholder" else None
        if name is None or name in constants:
            continue
        value = node.meta["val"]
        lookups = [u for u in node.users if u.target is aten.embedding.default and u.args[0] is node]
        others = [u for u in node.users if u not in lookups]
        rows = value.shape[0] if value.dim() else 1
        tiles = value.dim() == 2 and all(tileable(u, node) for u in others)
        nbytes = value.numel() * value.element_size()
        use = WeightUse(name, nbytes, rows, tiles, bool(lookups), bool(others))
        found.append((min((order[u] for u in others or lookups), default=0), use))
    return [use for _, use in sorted(found, key=lambda pair: pair[0])]


def cache_buffers(flat: fx.GraphModule) -> dict[str, int]:
    """Name and bytes of every cache buffer of a flat graph."""
    sizes = {}
    for node in flat.graph.nodes:
        mark = node.meta.get(META)
        if isinstance(mark, CacheInput):
            value = node.meta["val"]
            sizes[f"cache_{mark.side}_{mark.layer}"] = math.prod(value.shape) * value.element_size()
    return sizes
