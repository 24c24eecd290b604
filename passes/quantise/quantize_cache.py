"""Keep the KV cache quantised: append packs rows, attention unpacks them where it reads them."""

from __future__ import annotations

import torch
from torch import fx

from forebay.kernels.operators import of_target
from forebay.rewriter.ir.graph import META, CacheInput


def quantize_cache(gm: fx.GraphModule, bits: int, group: int, row_nbytes: int) -> None:
    """Make every cache that `gm` appends to and attends over, and every cache input of a step graph, one of packed
    rows uint8 [B, Hkv, L, row_nbytes], in groups of `group` along the head dimension.

    A graph without cache operators keeps its nodes.
    """
    caches: dict[fx.Node, None] = {n: None for n in gm.graph.find_nodes(op="placeholder")
                                   if isinstance(n.meta.get(META), CacheInput)}
    for node in gm.graph.nodes:
        operator = of_target(node.target)
        if operator is None or operator.over_rows is None:
            continue
        caches |= dict.fromkeys(operator.argument(node.args, name) for name in operator.caches)
        node.target = operator.over_rows.overload
        node.args = (*node.args, bits, group)
        node.meta["made_by"] = "quantize_cache"
    for cache in caches:
        value = cache.meta["val"]
        cache.meta["val"] = value.new_empty((*value.shape[:-1], row_nbytes), dtype=torch.uint8)
