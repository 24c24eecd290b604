"""Keep checkpoints of a layer beside K and V, and make K and V of them where the layer attends.

What is kept of a token is the value that the smallest cut finds (`smallest_cut`). The checkpoints of earlier tokens and
the values of new ones run through the layer's own operators together, so that each weight is brought and read once;
then K and V of the earlier ones go to their positions of the cache, and the new ones are appended as ever:

    cache_x [B, 1, X, W] ─┐
                          ├─ cat [1, B X + B S, W] ── the cut's operators ──┬─ index_put_ ─▶ cache_k, cache_v
    new values [B, S, W] ─┤                                                └─ kv_append ──▶ cache_k, cache_v
                          └─ index_put_ ─▶ cache_x

Which rows of `cache_x` hold whose checkpoint, two inputs of the step say: `restored_positions` [B, 1, X] where K and V
of each row go, and `checkpoint_rows` [B, S] where those of new tokens go. Rotary tables of the rows are made like those
of new tokens, from these positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from forebay.kernels.formats.table import NATIVE, Format
from forebay.kernels.operator import HOST_MEMORY
from forebay.kernels.operators import ACTIVATION_APPEND_Q, DEQUANTIZE_ROWS, KV_APPEND
from forebay.passes.checkpoint.smallest_cut import Cut, smallest_cut, token_nbytes
from forebay.rewriter.ir.cache_layout import CHECKPOINTED, RESTORED
from forebay.rewriter.ir.graph import META, values_of
from forebay.rewriter.ir.state import CHECKPOINT_TENSOR as X
from forebay.rewriter.ir.state import CheckpointState, StateInput, state_name
from forebay.rewriter.ir.symbolic_values import InputLayout, fill_graphs

aten = torch.ops.aten
_LAYOUT = "layout"  # in the meta of a placeholder that this pass made


class CannotCheckpoint(ValueError):
    """A model whose K and V cannot be made of checkpoints; the message says why."""


def checkpoint_kv(step: fx.GraphModule, stored: Format = NATIVE) -> None:
    """Put checkpoints, as they are or in packed rows of the format `stored`, into a captured step graph and the block
    graphs that it calls. CannotCheckpoint, before anything is changed, where the layers of a model do not have one
    value each that K and V are made of."""
    cuts = layer_cuts(step)
    positions = _positions(step)
    tables = {name: _tables_used(cut) for name, cut in cuts.items()}
    for call in step.graph.find_nodes(op="call_module"):
        for table in tables[call.target]:
            _cone(positions, _given(step, call, table))
    for name, cut in cuts.items():
        _rewrite_block(_block(step, name), cut, tables[name], stored)
    kept = {call.meta["layer"]: _kept(cuts[call.target].kept[0], stored)
            for call in step.graph.find_nodes(op="call_module")}
    _rewrite_step(step, kept, tables, positions)
    fill_graphs([*(_block(step, name) for name in cuts), step], _layout)
    step.meta[CheckpointState.kind] = kept


def layer_cuts(step: fx.GraphModule) -> dict[object, Cut]:
    """The cut of every block graph that a captured step graph calls. CannotCheckpoint where one has none."""
    found: dict[object, Cut] = {}
    for call in step.graph.find_nodes(op="call_module"):
        name = call.target
        if name in found:
            continue
        block = _block(step, name)
        names = [n.name for n in block.graph.find_nodes(op="placeholder")]
        tables = [inner for inner, given in zip(names, call.args, strict=True)
                  if isinstance(given, fx.Node) and follows_positions(given)]
        cut = smallest_cut(block, tables, behind_products=True)
        if cut is None:
            raise CannotCheckpoint(f"layers like {name} keep no K and V")
        if len(cut.kept) != 1 or not 2 <= _value(cut.kept[0]).dim() <= 3:
            raise CannotCheckpoint(f"in {name} K and V follow from {', '.join(n.name for n in cut.kept) or 'nothing'}, "
                                   "and checkpoints keep one value for each token")
        for node in cut.made:
            for source in node.all_input_nodes:
                if source.op != "placeholder" and values_of(source) and source not in {*cut.kept, *cut.made} and (
                        _follows_call(source)):
                    raise CannotCheckpoint(f"in {name} K and V follow from the positions of a call's tokens "
                                           f"({source.name}), which checkpoints do not keep")
        found[name] = cut
    if not found:
        raise CannotCheckpoint("the model has no layers that are captured by themselves")
    return found


def _block(step: fx.GraphModule, name: object) -> fx.GraphModule:
    block = step.get_submodule(str(name))
    assert isinstance(block, fx.GraphModule)
    return block


def follows_positions(node: fx.Node) -> bool:
    """Return whether a value of a step graph follows from where its tokens stand, and from weights, alone."""
    seen, waiting, starts = set[fx.Node](), [node], False
    while waiting:
        here = waiting.pop()
        if here in seen or not values_of(here):  # a size is not a value
            continue
        seen.add(here)
        starts |= here.target == "start"
        if here.op == "call_module" or (here.op == "placeholder" and here.target != "start"
                                        and here.meta.get(META) is None):
            return False
        waiting += here.all_input_nodes
    return starts and _value(node).dim() > 1


def _follows_call(node: fx.Node) -> bool:
    """Return whether a value of a block follows from more than weights: from positions, say, as ALiBi's do."""
    sources = [node] if node.op == "placeholder" else node.all_input_nodes
    return any(source.meta.get(META) is None if source.op == "placeholder" else _follows_call(source)
               for source in sources)


def _layout(node: fx.Node) -> InputLayout:
    """The layout of a placeholder: inputs are [B], [B, S], [B, heads, L, D] or as masks [B, 1, 1, S], of which B, S
    and L are symbols. A graph's first one is [B, S] or [B, S, H], and S may be anywhere in others."""
    if _LAYOUT in node.meta:
        return node.meta[_LAYOUT]  # type: ignore[no-any-return]
    value, tokens = _value(node), str(_value(node.graph.find_nodes(op="placeholder")[0]).shape[1])
    return value.dtype, tuple(n if isinstance(n, int) else "S" if str(n) == tokens else "BSLS"[i]
                              for i, n in enumerate(value.shape))


def _value(node: fx.Node) -> torch.Tensor:
    return values_of(node)[0]


def _width(node: fx.Node) -> int:
    return token_nbytes(node) // _value(node).element_size()


def _kept(node: fx.Node, stored: Format) -> CheckpointState:
    """Return the part of a value that is kept for a token."""
    dtype, width = _value(node).dtype, _width(node)
    if not stored.bits:
        return CheckpointState(width, dtype)
    return CheckpointState(stored.row_nbytes(width, dtype.itemsize), torch.uint8)


def _tables_used(cut: Cut) -> list[str]:
    """The placeholders of a block, weights apart, that making K and V again reads beside what is kept."""
    found: dict[str, None] = {}
    for node in cut.made:
        for source in node.all_input_nodes:
            if source.op == "placeholder" and source.meta.get(META) is None and source not in cut.kept:
                found[source.name] = None
    return list(found)


def _positions(step: fx.GraphModule) -> fx.Node | None:
    """The positions [B, S] of a step graph's tokens."""
    ids = next(n for n in step.graph.find_nodes(op="placeholder") if n.target == "input_ids")
    for node in step.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dtype is torch.int64 and node.op == "call_function" and (
                list(map(str, value.shape)) == list(map(str, _value(ids).shape)) and follows_positions(node)):
            return node  # type: ignore[no-any-return]
    return None


def _given(step: fx.GraphModule, call: fx.Node, name: str) -> fx.Node:
    """Return a call's argument for a placeholder of its block."""
    names = [n.name for n in _block(step, call.target).graph.find_nodes(op="placeholder")]
    found = call.args[names.index(name)]
    assert isinstance(found, fx.Node)
    return found


def _cone(positions: fx.Node | None, table: fx.Node) -> list[fx.Node]:
    """The nodes that make a table of positions [B, S], and those that have a line for each sequence beside it (angles'
    rates expanded to B). CannotCheckpoint where it follows from anything else of the call."""
    depends: dict[fx.Node, bool] = {}
    batch = None if positions is None else str(_value(positions).shape[0])

    def through(node: fx.Node) -> bool:
        if node not in depends:
            if node is positions:
                depends[node] = True
            elif node.op == "placeholder":
                if node.meta.get(META) is None:
                    raise CannotCheckpoint(f"{table.name} follows from {node.name}, not from positions alone")
                depends[node] = False
            else:
                follows = any([through(source) for source in node.all_input_nodes if values_of(source)])
                depends[node] = follows or any(str(size) == batch for size in _value(node).shape)
        return depends[node]

    if positions is None or not through(table):
        raise CannotCheckpoint(f"{table.name} does not follow from positions")
    return [node for node in table.graph.nodes if depends.get(node) and node is not positions]


class _GraphEdit:
    """Puts operators into a captured graph; they get their values at the end (`_fill`)."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph

    def __call__(self, target: Any, *args: Any, name: str | None = None, **kwargs: Any) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        node.meta["made_by"] = "checkpoint_kv"
        return node

    def input(self, name: str, layout: InputLayout, mark: object = None) -> fx.Node:
        """A placeholder of this layout."""
        node = self.graph.create_node("placeholder", name, name=name)
        node.meta |= {"made_by": "checkpoint_kv", _LAYOUT: layout} | ({} if mark is None else {META: mark})
        return node

    def heads_first(self, value: Any) -> fx.Node:
        """[B, S, Hkv, …] as [B, Hkv, S, …], or the other way."""
        return self(aten.permute.default, value, [0, 2, 1, 3])

    def keep(self, kept: fx.Node, places: list[fx.Node], value: fx.Node, stored: Format) -> tuple[fx.Node, fx.Node]:
        """Put the value of new tokens to its places among what is kept [B, rows, …], by sequence and row. (What was
        kept before of all sequences [1, B rows, width], that and the new value behind it.)"""
        width, packing = _width(value), (stored.bits, stored.group_size)
        old = self(aten.reshape.default, kept, [1, -1, _kept(value, stored).width])
        if stored.bits:
            old = self(DEQUANTIZE_ROWS.overload, old, width, *packing, torch.float16, _value(value).dtype, False)
        every = self(aten.cat.default, [old, self(aten.reshape.default, value, [1, -1, width])], 1)
        new = self(aten.reshape.default, value, [self(aten.sym_size.int, places[0], 0), -1, width])
        if stored.bits:
            self(ACTIVATION_APPEND_Q.overload, kept, new, places[1], *packing)
        else:
            self(aten.index_put_.default, kept, places, new)
        return old, every

    def over_rows(self, nodes: Iterable[fx.Node], env: dict[fx.Node, fx.Node], tokens: fx.Node, rows: fx.Node) -> None:
        """Put nodes that compute on [B, S, …] again, on [1, rows, …]; `env` holds what they read instead, and then what
        they became. `tokens` is a value [B, S, …]."""
        batch, length = _value(tokens).shape[:2]

        def one(arg: Any) -> Any:
            if not isinstance(arg, fx.Node):
                return arg
            size = arg.meta.get("val")
            if arg in env or not isinstance(size, torch.SymInt):
                return env.get(arg, arg)
            for known, put in ((batch, 1), (length, rows), (batch * length, rows)):
                if str(size) == str(known):
                    return put
            raise CannotCheckpoint(f"{arg.name} is a size {size}, of neither sequences nor tokens")

        for node in nodes:
            args, kwargs = map_aggregate((node.args, node.kwargs), one)  # type: ignore[misc]
            env[node] = self(node.target, *args, name=f"{node.name}_rows", **kwargs)


def _rewrite_block(block: fx.GraphModule, cut: Cut, tables: list[str], stored: Format) -> None:
    graph, (kept,) = block.graph, cut.kept
    placeholders = {n.name: n for n in graph.find_nodes(op="placeholder")}
    cache_k, cache_v, k, v, start, *packing = cut.append.args
    assert isinstance(cache_k, fx.Node)
    token = next(n for n in graph.find_nodes(op="placeholder") if n.meta.get(META) is None and _value(n).dim() == 3)
    write, width, spec = _GraphEdit(graph), _width(kept), _kept(kept, stored)
    with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
        cache_x = write.input(state_name(X), (spec.dtype, ("B", 1, "L", spec.width)), cache_k.meta.get(META))
        restored = write.input(RESTORED, (torch.int64, ("B", 1, "L")))
        rows_of = write.input(CHECKPOINTED, (torch.int64, ("B", "S")))
        env = {placeholders[name]: write.input(f"{name}_rows", (
            _value(placeholders[name]).dtype, (1, "R", *_value(placeholders[name]).shape[2:]))) for name in tables}
    batch, length = _value(token).shape[:2]
    made = set(cut.made) | {user for node in cut.made for user in node.users if len(values_of(node)) > 1}
    slice_ = [node for node in graph.nodes if node in made]
    _bring_forward(slice_, made)
    with graph.inserting_before(slice_[0]):
        count = write(aten.sym_size.int, token, 0)
        number = write(aten.unsqueeze.default, write(aten.arange.default, count, device=HOST_MEMORY,
                                                     pin_memory=False), 1)
        old, every = write.keep(write(aten.select.int, cache_x, 1, 0), [number, rows_of], kept, stored)
        before, rows = write(aten.sym_size.int, old, 1), write(aten.sym_size.int, every, 1)
        env[kept] = every if _value(kept).dim() == 3 else write(aten.reshape.default, every, [-1, width])
        write.over_rows(slice_, env, token, rows)

        def part(node: fx.Node, first: Any, last: Any) -> tuple[fx.Node, int]:
            """Return the rows of a value from `first` on, [B, …] again; and the dimension of tokens."""
            sizes = list(map(str, _value(node).shape))
            dim = sizes.index(str(length)) if str(length) in sizes else sizes.index(str(batch * length))
            found = write(aten.slice.Tensor, env[node], dim, first, last)
            shape = _value(node).shape
            if len(shape) < 3:  # sequences and tokens are one dimension
                return found, dim
            order = [0, dim, *(i for i in range(1, len(shape)) if i != dim)]
            tokens_first = found if dim == 1 else write(aten.permute.default, found, order)
            return write(aten.reshape.default, tokens_first, [count, -1, *(shape[i] for i in order[2:])]), dim

        for node in slice_:
            others = [user for user in node.users if user not in made and user is not cut.append]
            if others:
                found, dim = part(node, before, rows)
                if dim == 2:
                    found = write(aten.permute.default, found, [0, 2, 1, 3])
                node.replace_all_uses_with(found, lambda user, others=others: user in others)  # type: ignore[misc]
    with graph.inserting_before(cut.append):
        assert isinstance(k, fx.Node) and isinstance(v, fx.Node)
        places, again = write(aten.select.int, restored, 1, 0), [part(node, 0, before)[0] for node in (k, v)]
        if cut.append.target is not KV_APPEND.overload:
            write(cut.append.target, cache_k, cache_v, *[write.heads_first(node) for node in again], places, *packing)
        else:
            for cache, node in zip((cache_k, cache_v), again, strict=True):
                write(aten.index_put_.default, write.heads_first(cache), [number, places], node)
        appended = [write.heads_first(part(node, before, rows)[0]) for node in (k, v)]
    cut.append.args = (cache_k, cache_v, *appended, start, *packing)
    for node in reversed(slice_):
        if not node.users:
            graph.erase_node(node)


def _bring_forward(slice_: list[fx.Node], made: set[fx.Node]) -> None:
    """Let what of weights alone is read by nodes of a block that are made again stand before the first of them."""
    read: set[fx.Node] = set()
    for node in reversed([*slice_[0].graph.nodes]):
        if node.op == "call_function" and node not in made and values_of(node) and any(
                user in made or user in read for user in node.users) and not _follows_call(node):
            read.add(node)
    for node in [node for node in slice_[0].graph.nodes if node in read]:
        slice_[0].prepend(node)


def _rewrite_step(
    step: fx.GraphModule, kept: dict[int, CheckpointState], tables: dict[object, list[str]], positions: fx.Node | None
) -> None:
    graph = step.graph
    caches = [n for n in graph.find_nodes(op="placeholder") if isinstance(n.meta.get(META), StateInput)]
    write = _GraphEdit(graph)
    with graph.inserting_before(caches[0]):
        restored = write.input(RESTORED, (torch.int64, ("B", 1, "L")))
        rows_of = write.input(CHECKPOINTED, (torch.int64, ("B", "S")))
    calls = graph.find_nodes(op="call_module")
    windows = {n.meta[META].layer: n.meta[META].window for n in caches}
    given_x: dict[int, fx.Node] = {}
    with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
        for call in calls:
            layer, spec = call.meta["layer"], kept[call.meta["layer"]]
            given_x[layer] = write.input(state_name(X, layer), (spec.dtype, ("B", 1, "L", spec.width)),
                                         StateInput(layer, X, CheckpointState.kind, windows[layer]))
    env: dict[fx.Node, fx.Node] = {}
    if positions is not None and any(tables.values()):
        with graph.inserting_before(positions.next):
            new = write(aten.reshape.default, positions, [1, -1])
            old = write(aten.reshape.default, restored, [1, -1])
            env[positions] = write(aten.cat.default, [old, new], 1)
            rows = write(aten.sym_size.int, env[positions], 1)
    for call in calls:
        names = tables[call.target]
        given = [_given(step, call, name) for name in names]
        with graph.inserting_before(call):
            for table in given:
                write.over_rows([n for n in _cone(positions, table) if n not in env], env, positions, rows)  # type: ignore[arg-type]
        inner = [n.name for n in _block(step, call.target).graph.find_nodes(op="placeholder")]
        more = {state_name(X): given_x[call.meta["layer"]], RESTORED: restored, CHECKPOINTED: rows_of,
                **{f"{name}_rows": env[table] for name, table in zip(names, given, strict=True)}}
        call.args = (*call.args, *(more[name] for name in inner[len(call.args):]))
