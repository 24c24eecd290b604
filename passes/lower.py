"""Turn a flat graph with planned buffers into a `Program`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import torch
from torch import fx

from forebay.passes.launches import Launches
from forebay.passes.out_variants import mutated_arguments
from forebay.rewriter import ops
from forebay.rewriter.graph import META, CacheInput, Layout, Transfer, WeightInput, storage_of, values_of, weight_name
from forebay.rewriter.plan import BufferPlacement, Plan
from forebay.rewriter.program import (
    COMPUTE,
    DISK,
    LOOKUP,
    UPLOAD,
    Copy,
    FileRows,
    FileSlice,
    Item,
    Launch,
    Program,
    Record,
    Release,
    Span,
    TensorRef,
    Wait,
    span_of,
)

PAGE = 4096  # direct reads are aligned to this, in the file and in memory


def lower(
    gm: fx.GraphModule,
    plan: Plan,
    files: Mapping[str, FileSlice],
    workspace: Callable[[fx.Node], int],
    name: str = "step",
) -> Program:
    """The flat list of one step. `files` gives the bytes of every weight on the disk tier, `workspace` the transient
    bytes of one of our own operators.

    A fetch becomes a Copy behind a Wait for its slot and before a Record; its first reader waits for that Record; a
    release becomes a Release and a Record. The first `lead` fetches are issued in the prologue and then, for the next
    step, as soon as their slots are free at the end of each step.
    """
    return _Lowering(gm, plan, files, workspace, name).run()


class _Lowering:
    def __init__(
        self, gm: fx.GraphModule, plan: Plan, files: Mapping[str, FileSlice], workspace: Callable[[fx.Node], int],
        name: str,
    ) -> None:
        layout = gm.meta[META]
        assert isinstance(layout, Layout), "allocate_buffers runs before lower"
        self.gm, self.plan, self.files, self.name, self.layout = gm, plan, files, name, layout
        self.placed = {b.name: b for b in plan.buffers}
        self.items: list[Item] = []
        self.prologue: list[Item] = []
        self.events: dict[tuple, int] = {}
        self.landed: dict[fx.Node, int] = {}  # storage node -> event its first reader must wait for
        self.freed: dict[str, int] = {}  # slot -> event recorded when its last contents were released
        self.tail: dict[int, list[Transfer]] = {}  # released transfer -> next step's fetches to issue behind it
        self.slot_spans: dict[fx.Node, tuple[Span, TensorRef]] = {}
        self.refs: dict[tuple[fx.Node, int], TensorRef] = {}
        self.homes: dict[tuple[fx.Node, int], tuple[str, int, str]] = {}
        self.launches = Launches(self.ref, workspace)
        self.repeated: dict[tuple[str, object], list[Launch]] = {}
        self.own: dict[fx.Node, bool] = {}

    def run(self) -> Program:
        nodes = list(self.gm.graph.nodes)
        transfers = [n.meta[META] for n in nodes if n.target is ops.fetch]
        self._schedule_tail(transfers)
        self._open_free_slots(transfers)
        resident = self._resident()
        inputs: dict[str, TensorRef] = {}
        outputs: dict[str, TensorRef] = {}
        for node in nodes:
            if node.op == "placeholder":
                if node.meta.get(META) is None and values_of(node):
                    inputs[str(node.target)] = self.ref(node)
                    resident[node.name] = self._buffer_span(self.layout.home[node, 0])
            elif node.op == "output":
                for i, value in enumerate(_flatten(node.args[0])):
                    if isinstance(value, fx.Node) and values_of(value):
                        outputs[f"out{i}"] = self.ref(value)
            elif node.target is ops.fetch:
                in_flight = node.meta[META].index < self.plan.schedule.lead
                self._fetch(node.meta[META], self.prologue if in_flight else self.items, node)
            elif node.target is ops.release:
                self._release(node)
            elif node.target is ops.gather_rows:
                self._gather(node)
            elif node.target is not operator.getitem and (node.meta.get("alias_of") is None or _writes_argument(node)):
                self._launch(node)
            self._end_of_life(node)
        return Program(self.name, tuple(self.items), tuple(self.prologue), dict(self.plan.arenas), resident, inputs,
                       outputs)

    # -- addresses

    def _buffer_span(self, name: str) -> Span:
        b = self.layout.buffers.get(name) or self.placed[name]
        return Span(b.arena, b.offset, b.nbytes, b.name)

    def _home(self, key: tuple[fx.Node, int]) -> tuple[str, int, str]:
        """Arena, byte address and buffer name of a storage."""
        found = self.homes.get(key)
        if found is None:
            node, _ = key
            mark = node.meta.get(META)
            if isinstance(mark, WeightInput):
                b = self.placed[mark.name]
            elif isinstance(mark, CacheInput):
                b = self.placed[f"cache_{mark.side}_{mark.layer}"]
            else:
                b = self.layout.buffers[self.layout.home[key]]
            found = self.homes[key] = (b.arena, b.offset, b.name)
        return found

    def ref(self, node: fx.Node, result: int = 0) -> TensorRef:
        """Where a node's value lies; `result` picks one of several."""
        known = self.refs.get((node, result))
        if known is None:
            value = values_of(node)[result]
            base, element = storage_of(node)
            if base is node:
                element = result
            if base.target is ops.fetch:
                _, tile = self.slot_spans[base]
                arena, address, buffer = tile.arena, tile.offset, tile.buffer
            else:
                arena, address, buffer = self._home((base, element))
            known = self.refs[node, result] = TensorRef(
                arena, address + int(value.storage_offset()) * value.element_size(), str(value.dtype)[6:],
                tuple(value.shape), tuple(value.stride()), buffer)
        return known

    def _resident(self) -> dict[str, Span]:
        kept = ("weight", "constant", "cache")
        return {b.name: Span(b.arena, b.offset, b.nbytes, b.name) for b in self.plan.buffers if b.kind in kept}

    # -- transfers

    def _event(self, *key: object) -> int:
        """One event per key: a copy issued in the prologue and again at the end of a step records the same one."""
        return self.events.setdefault(key, len(self.events) + 1)

    def _open_free_slots(self, transfers: list[Transfer]) -> None:
        """Slots that no copy in flight occupies are free for this step once the step before has computed. Host slots
        count one by one: a copy in flight may come from host memory and leave its host slot alone."""
        schedule = self.plan.schedule
        if schedule.lead < min(schedule.slots, len(transfers)) or (schedule.host_hop and transfers):
            top = self._event("top")
            self.items.append(Record(COMPUTE, top))
            self.freed = {f"{kind}{i}": top for kind in ("slot", "host_slot") for i in range(schedule.slots)}

    def _schedule_tail(self, transfers: list[Transfer]) -> None:
        """Decide behind which release each of the next step's first fetches can be issued, keeping their order."""
        last_in_slot = {t.slot: t.index for t in transfers}
        behind = 0
        for t in transfers[: self.plan.schedule.lead]:
            behind = max(behind, last_in_slot[t.slot])
            self.tail.setdefault(behind, []).append(t)

    def _source(self, t: Transfer) -> FileSlice | Span:
        placement = self.plan.weight(t.weight)
        spec = self.files.get(t.weight)
        rows = self._rows(t.weight)
        row_nbytes = placement.nbytes // rows
        if placement.tier == "disk":
            if spec is None:
                raise KeyError(f"lower: {t.weight} is on the disk tier, but no file holds it")
            return FileSlice(spec.path, spec.offset + t.lower * row_nbytes, (t.upper - t.lower) * row_nbytes)
        b = self.placed[t.weight]
        return Span(b.arena, b.offset + t.lower * row_nbytes, (t.upper - t.lower) * row_nbytes, t.weight)

    def _rows(self, weight: str) -> int:
        value = self._weight_values[weight]
        return max(1, value.shape[0] if value.dim() else 1)

    @property
    def _weight_values(self) -> dict[str, torch.Tensor]:
        cached = self.__dict__.get("_weights")
        if cached is None:
            cached = self.__dict__["_weights"] = {
                weight_name(n): n.meta["val"] for n in self.gm.graph.nodes
                if n.op == "placeholder" and weight_name(n) is not None}
        return cached

    def _landing(self, source: FileSlice | Span, slot: BufferPlacement, itemsize: int) -> tuple[Span, tuple[int, int]]:
        """Where in a slot the bytes land: congruent with the file to a page, so that they can be read in place."""
        shift = source.offset % PAGE if isinstance(source, FileSlice) and source.offset % itemsize == 0 else 0
        end = shift + source.nbytes
        room = (shift, -end % PAGE) if isinstance(source, FileSlice) and source.offset % itemsize == 0 else (0, 0)
        if end + room[1] > slot.nbytes:
            raise ValueError(f"lower: {source.nbytes} bytes do not fit {slot.name} of {slot.nbytes} bytes")
        return Span(slot.arena, slot.offset + shift, source.nbytes, slot.name), room

    def _fetch(self, t: Transfer, into: list[Item], node: fx.Node | None) -> None:
        """Issue copy `t`, after its slot is free and with an event recorded when it has landed."""
        source = self._source(t)
        label = f"fetch {t.weight}" + (f"[{t.lower}:{t.upper}]" if t.lower or t.upper < self._rows(t.weight) else "")
        itemsize = self._weight_values[t.weight].element_size()
        device_slot, buffer = self.placed[f"slot{t.slot}"], f"slot{t.slot}:{t.index}"
        landed = self._event("landed", t.index)
        first_hop = self.placed[f"host_slot{t.slot}"] if (
            self.plan.schedule.host_hop and isinstance(source, FileSlice)) else None
        target = first_hop or device_slot
        span, room = self._landing(source, target, itemsize)
        stream = DISK if isinstance(source, FileSlice) else UPLOAD
        if into is self.items and target.name in self.freed:
            into.append(Wait(stream, self.freed[target.name]))
        named = Span(span.arena, span.offset, span.nbytes, f"{target.name}:{t.index}")
        into.append(Copy(stream, source, named, label, room=room))
        if first_hop is not None:
            arrived = self._event("arrived", t.index)
            into.append(Record(DISK, arrived))
            into.append(Wait(UPLOAD, arrived))
            if into is self.items and device_slot.name in self.freed:
                into.append(Wait(UPLOAD, self.freed[device_slot.name]))
            final = Span(device_slot.arena, device_slot.offset, source.nbytes, buffer)
            into.append(Copy(UPLOAD, named, final, label.replace("fetch", "upload")))
            into.append(Release(UPLOAD, _widen(named, room)))
            done = self.freed[target.name] = self._event("left", t.index)
            into.append(Record(UPLOAD, done))
            stream, named, room = UPLOAD, final, (0, 0)
        into.append(Record(stream, landed))
        if node is not None:
            self._tile_at(node, named, room, landed)

    def _tile_at(self, node: fx.Node, span: Span, room: tuple[int, int], landed: int) -> None:
        value = node.meta["val"]
        tile = TensorRef(span.arena, span.offset, str(value.dtype)[6:], tuple(value.shape), tuple(value.stride()),
                         span.buffer)
        self.slot_spans[node] = (_widen(span, room), tile)
        self.landed[node] = landed

    def _release(self, node: fx.Node) -> None:
        fetch = node.args[0]
        assert isinstance(fetch, fx.Node)
        t = fetch.meta[META]
        span, _ = self.slot_spans[fetch]
        self.items.append(Release(COMPUTE, span))
        event = self.freed[f"slot{t.slot}"] = self._event("freed", t.index)
        self.items.append(Record(COMPUTE, event))
        for following in self.tail.get(t.index, ()):
            self._fetch(following, self.items, None)

    def _gather(self, node: fx.Node) -> None:
        weight, index = node.args
        assert isinstance(weight, fx.Node) and isinstance(index, fx.Node)
        name = weight_name(weight)
        assert name is not None
        placement, spec = self.plan.weight(name), self.files[name]
        self._wait_for(index)
        rows = self._rows(name)
        ready, landed = self._event("ready", node.name), self._event("landed", node.name)
        out = self.ref(node)
        source = FileRows(spec.path, spec.offset, placement.nbytes // rows, rows, self.ref(index))
        label, layer = f"gather {name}", node.meta.get("layer", -1)
        self.items += [Record(COMPUTE, ready), Wait(LOOKUP, ready)]
        if self.plan.schedule.host_hop:
            b = self.placed["host_rows"]
            landing = Span(b.arena, b.offset, span_of(out).nbytes, f"host_rows:{node.name}")
            arrived, uploaded = self._event("arrived", node.name), self.freed.get("host_rows")
            if uploaded is not None:
                self.items.append(Wait(LOOKUP, uploaded))
            self.items += [Copy(LOOKUP, source, landing, label, layer), Record(LOOKUP, arrived), Wait(UPLOAD, arrived),
                           Wait(UPLOAD, ready), Copy(UPLOAD, landing, span_of(out), label, layer),
                           Release(UPLOAD, landing), Record(UPLOAD, landed)]
            self.freed["host_rows"] = landed
        else:
            self.items += [Copy(LOOKUP, source, span_of(out), label, layer), Record(LOOKUP, landed)]
        self.landed[node] = landed

    # -- launches

    def _wait_for(self, *nodes: fx.Node) -> None:
        for node in nodes:
            base, _ = storage_of(node)
            event = self.landed.pop(base, None)
            if event is not None:
                self.items.append(Wait(COMPUTE, event))

    def _launch(self, node: fx.Node) -> None:
        operands = node.all_input_nodes
        self._wait_for(*operands)
        twin = self.layout.twins.get(node)
        if twin is None or any(self._of_layer(n) for n in operands):
            self.items += self.launches.of(node)
            return
        known = self.repeated.get((twin, node.target))
        if known is None:
            known = self.repeated[twin, node.target] = self.launches.of(node)
        layer = node.meta.get("layer", -1)
        self.items += [Launch(k.stream, k.op, k.args, k.kwargs, k.out, k.reads, k.writes, node.name, layer, k.flops,
                              k.workspace_nbytes, k.impl) for k in known]

    def _of_layer(self, node: fx.Node) -> bool:
        """Whether a node shows memory that every layer has of its own: a weight or cache."""
        found = self.own.get(node)
        if found is None:
            base, _ = storage_of(node)
            found = self.own[node] = base.target is ops.fetch or isinstance(
                base.meta.get(META), WeightInput | CacheInput)
        return found

    def _end_of_life(self, node: fx.Node) -> None:
        for name in self.layout.ends.get(node, ()):
            self.items.append(Release(COMPUTE, self._buffer_span(name)))


def _writes_argument(node: fx.Node) -> bool:
    """Whether an operator works in place (and may return, as an alias, what it wrote)."""
    return isinstance(node.target, torch._ops.OpOverload) and bool(mutated_arguments(node.target))


def _widen(span: Span, room: tuple[int, int]) -> Span:
    return Span(span.arena, span.offset - room[0], span.nbytes + sum(room), span.buffer)


def _flatten(value: object) -> list[object]:
    return [v for item in value for v in _flatten(item)] if isinstance(value, tuple | list) else [value]
