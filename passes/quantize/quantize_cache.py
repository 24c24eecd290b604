"""Keep the KV cache quantized: append packs rows, attention unpacks them where it reads them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from forebay.kernels.formats.table import CacheFormat
from forebay.kernels.operators import ATTENTION, KV_APPEND, find, of_target
from forebay.rewriter.ir.graph import META
from forebay.rewriter.ir.plan import PlanError
from forebay.rewriter.ir.state import KVState, LatentState, StateInput

ROWS = (KVState.kind, LatentState.kind)


def quantize_cache(gm: fx.GraphModule, stored: CacheFormat) -> None:
    """Make every cache that `gm` appends to and attends over, and every cache input of a step graph, one of rows packed
    in the format `stored`: uint8 [B, Hkv, L, nbytes of a row]. Rows of latents are packed like keys.

    A graph without cache operators keeps its nodes. PlanError for attention with sinks, or between the tokens
    of an image, which reads values alone.
    """
    caches: dict[fx.Node, None] = {n: None for n in gm.graph.find_nodes(op="placeholder")
                                   if isinstance(mark := n.meta.get(META), StateInput) and mark.kind in ROWS}
    for node in gm.graph.nodes:
        operator = of_target(node.target)
        if operator not in (ATTENTION, KV_APPEND):
            continue
        for name, what in (("sinks", "with sinks"), ("until", "between tokens of an image")):
            if operator is ATTENTION and ATTENTION.argument(node.args, name) is not None:
                raise PlanError(f"cache: attention {what} reads no {stored.name} rows; keep the cache native")
        packed, read = find(stored.append if operator.appends else stored.attend), operator.given_caches(node.args)
        assert packed is not None
        caches |= dict.fromkeys(read)
        how = stored.arguments(read[0].meta["val"].shape[-1]).values()
        node.target = packed.overload
        node.args = (*node.args, *how) if operator.appends else _packed_attention(node.args, how)
        node.meta["made_by"] = "quantize_cache"
    for cache in caches:
        value = cache.meta["val"]
        nbytes = stored.row_nbytes(value.shape[-1], value.dtype.itemsize)
        cache.meta["val"] = value.new_empty((*value.shape[:-1], nbytes), dtype=torch.uint8)


def _packed_attention(args: tuple[Any, ...], how: Iterable[object]) -> tuple[Any, ...]:
    """Arguments of attention over values as those over packed rows."""
    chosen = ATTENTION.argument(args, "chosen")
    return (*args[:7], *how) if chosen is None else (*args[:7], *how, *args[7:10], chosen)
