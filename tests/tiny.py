"""Tiny flat graphs whose weights lie in a file, and Programs run on the thread device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import fx

from forebay.passes.lower.hoist_prefetch import hoist_prefetch
from forebay.passes.lower.lower import lower
from forebay.passes.lower.place_copies import place_copies
from forebay.passes.place.allocate_buffers import allocate_buffers, place_activations, plan_activations
from forebay.passes.place.insert_transfers import insert_transfers
from forebay.passes.place.select_gemm import select_gemm
from forebay.rewriter.capture.concretise import concretise
from forebay.rewriter.capture.step_graphs import StepGraphs
from forebay.rewriter.ir.graph import META, WeightInput
from forebay.rewriter.ir.plan import (
    Budget,
    BufferPlacement,
    GemmChoice,
    Limits,
    Plan,
    Schedule,
    WeightPlacement,
    Workload,
)
from forebay.rewriter.ir.products import product_shape
from forebay.rewriter.ir.program import DISK, Copy, FileSlice, Item, Program, Span
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.options import Options
from forebay.rewriter.switches import Switches
from forebay.runtime.devices.cpu.device import ThreadDevice
from forebay.runtime.disk.reader import DiskReader, open_reader
from forebay.runtime.run.executor import BoundProgram, load_resident

aten = torch.ops.aten
Build = Callable[[fx.Graph, Mapping[str, fx.Node]], object]  # adds nodes to the graph, returns what it outputs


def flat_graph(build: Build, inputs: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> fx.GraphModule:
    """A flat concrete graph: `build` sees the graph and a placeholder for each input and each weight by name."""
    graph = fx.Graph()
    nodes, sizes = {}, {}
    for name, value in (*inputs.items(), *weights.items()):
        node = nodes[name] = graph.placeholder(name)
        sizes[node.name] = torch.empty_like(value, device="meta")
        if name in weights:
            node.meta[META] = WeightInput(name)
    graph.output(build(graph, nodes))
    return concretise(fx.GraphModule({}, graph), sizes)


def run_graph(gm: fx.GraphModule, inputs: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> list:
    """The outputs of a graph, rewritten or not, run as Python."""
    values = {**inputs, **weights}
    names = [n.target for n in gm.graph.nodes if n.op == "placeholder"]
    with torch.no_grad():
        found = fx.Interpreter(gm).run(*(values[n].clone() for n in names))
    return list(found) if isinstance(found, tuple | list) else [found]


@dataclass(frozen=True)
class Tiny:
    """A hand-made model: `build` for flat graphs, its example inputs, its weights, and the file they lie in."""

    build: Build
    inputs: Mapping[str, torch.Tensor]
    weights: Mapping[str, torch.Tensor]
    files: Mapping[str, FileSlice]

    def graph(self) -> fx.GraphModule:
        return flat_graph(self.build, self.inputs, self.weights)

    def source(self, **options: object) -> StepGraphs:
        return StepGraphs("tiny", lambda tokens: self.graph(), self.files, **options)  # type: ignore[arg-type]

    def pipeline(self, switches: Switches | None = None, **options: object) -> Pipeline:
        return Pipeline(self.source(**options), Workload(1, 1, 1), Machine.default(), switches or Switches())

    def expected(self) -> list[torch.Tensor]:
        return run_graph(self.graph(), self.inputs, self.weights)


def tiny(folder: Path, build: Build, inputs: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> Tiny:
    """Write the weights one after the other, from an odd offset on, as they stand in real checkpoints."""
    path = folder / "weights.bin"
    files, content = {}, bytearray(b"\x7f" * 52)
    for name, value in weights.items():
        data = value.contiguous().view(torch.uint8).numpy().tobytes()
        files[name] = FileSlice(str(path), len(content), len(data))
        content += data
    path.write_bytes(content)
    return Tiny(build, inputs, weights, files)


def chain(folder: Path, layers: int = 3, width: int = 32, rows: int = 2) -> Tiny:
    """x -> relu(x W_i^T + b_i) for `layers` layers; the matrices stream, the biases stay."""
    generator = torch.Generator().manual_seed(layers * 1000 + width)
    weights = {}
    for i in range(layers):
        weights[f"w{i}"] = torch.randn(width, width, generator=generator) / width**0.5
        weights[f"b{i}"] = torch.randn(width, generator=generator)
    inputs = {"x": torch.randn(rows, width, generator=generator)}

    def build(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> object:
        x = nodes["x"]
        for i in range(layers):
            x = graph.call_function(aten.linear.default, (x, nodes[f"w{i}"], nodes[f"b{i}"]))
            x = graph.call_function(aten.relu.default, (x,))
        return (x,)

    return tiny(folder, build, inputs, weights)


def plan_for(
    weights: Mapping[str, WeightPlacement], slots: int = 2, lead: int | None = None, slot_nbytes: int = 8192,
    arena: int = 1 << 16,
) -> Plan:
    """A plan made by hand: slots at the bottom of the arena, then the resident weights, activations on top."""
    buffers = [BufferPlacement(f"slot{i}", "slot", "device", i * slot_nbytes, slot_nbytes) for i in range(slots)]
    end = slots * slot_nbytes
    for w in weights.values():
        if w.tier == "device":
            buffers.append(BufferPlacement(w.name, "weight", "device", end, w.nbytes))
            end += -(-w.nbytes // 64) * 64
    schedule = Schedule(slots, slot_nbytes, lead or slots, prefill_chunks=(1,))
    return Plan("tiny", "", Limits(arena), Workload(1, 1, 1), schedule, tuple(weights.values()), {"device": arena},
                buffers=tuple(buffers))


def placements(model: Tiny, stream: Mapping[str, int | str]) -> dict[str, WeightPlacement]:
    """Every weight resident but those in `stream`: name -> rows per tile (0: whole), or "gather"."""
    found = {}
    for name, value in model.weights.items():
        nbytes = value.numel() * value.element_size()
        how = stream.get(name)
        if how is None:
            found[name] = WeightPlacement(name, "device", nbytes)
        else:
            found[name] = WeightPlacement(name, "disk", nbytes, tile_rows=0 if how == "gather" else int(how),
                                          gather=how == "gather")
    return found


def completed(gm: fx.GraphModule, plan: Plan, reuse: bool = True) -> Plan:
    """A plan made by hand with what else the last passes want: places for the activations of a tiled graph, which gets
    its `Layout`, and torch's own products."""
    layout = gm.meta[META] = plan_activations(gm, reuse, plan.schedule.batching)
    shapes = {shape for node in gm.graph.nodes if (shape := product_shape(node)) is not None}
    return replace(plan, buffers=(*plan.buffers, *place_activations(layout, plan, "decode")),
                   gemm=tuple(GemmChoice(*shape, impl="aten") for shape in sorted(shapes)))


def allocated(gm: fx.GraphModule, plan: Plan, reuse: bool = True) -> Plan:
    """The last passes on a tiled graph, and the completed plan."""
    plan = completed(gm, plan, reuse)
    select_gemm(gm, plan)
    allocate_buffers(gm, plan)
    return plan


def lowered(model: Tiny, plan: Plan, hoist: bool = True, reuse: bool = True) -> Program:
    """The Program of the model's graph under a plan made by hand, not verified."""
    gm = model.graph()
    insert_transfers(gm, plan)
    plan = allocated(gm, plan, reuse)
    draft = lower(gm, plan, model.files, lambda launch: launch)
    if hoist:
        hoist_prefetch(draft, plan)
    return place_copies(draft, plan)


def run_program(
    program: Program, plan: Plan, model: Tiny, *, steps: int = 2, reader: DiskReader | None = None,
    poison: bool = False, sync: bool = False,
) -> list[torch.Tensor]:
    """Outputs of the last of `steps` steps with the same inputs, which must be those of every step before."""
    device = ThreadDevice(reader or open_reader("buffered"), poison=poison, sync=sync)
    device.allocate(program.arenas)
    try:
        places = {b.name: Span(b.arena, b.offset, b.nbytes, b.name) for b in plan.buffers if b.kind == "weight"}
        load_resident((Copy(DISK, model.files[name], place, f"load {name}") for name, place in places.items()), device)
        bound = BoundProgram(program, device)
        outputs: list[torch.Tensor] = []
        for step in range(steps):
            for name, value in model.inputs.items():
                bound.inputs[name].copy_(value)
            if step == 0:
                bound.start()
            bound.run()
            found = [bound.outputs[f"out{i}"].clone() for i in range(len(bound.outputs))]
            assert not outputs or all(torch.equal(a, b) for a, b in zip(found, outputs, strict=True))
            outputs = found
        device.finish()
        return outputs
    finally:
        device.close()


def planned(model: Tiny, budget: Budget, options: Options | None = None, **more: object) -> tuple[Plan, Program]:
    """The pipeline's plan for `budget` and its verified Program."""
    pipeline = model.pipeline(**more)  # type: ignore[arg-type]
    plan = pipeline.plan(budget, options)
    return plan, pipeline.program(plan, 1)


def issue(target: ThreadDevice, *items: Item) -> None:
    """Bind and issue items of a Program on a device by themselves."""
    for item in items:
        call = target.bind(item, None)
        if call is not None:
            call()


def bytes_at(address: int, nbytes: int) -> torch.Tensor:
    """The bytes of memory at an address, as a tensor that does not own them."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
