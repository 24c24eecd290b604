"""Seconds of a batch's prefill and of one of its decode steps, from the one cost library, kept by their arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.partition.collectives import ChipMesh, mesh_of
from forebay.rewriter.partition.layouts import ChipLayout, PhaseWork, attention_cost, outside_cost, product_cost
from forebay.rewriter.predict.estimator import Estimator, MachineEstimator
from forebay.rewriter.predict.model_shapes import ATTENTION, MLP, LayerShape, ModelError, ModelShape
from forebay.rewriter.predict.roofline import asynchronous_time_s, attaining
from forebay.rewriter.serving.llama_tables import EFFICIENCY, layer_modules, symbols

KEPT = 1 << 16  # results per function: a search asks for a few hundred, a trace for as many as it has lengths
ENDLESS = 1 << 40  # tokens of a cache where layers keep only states of one size
AROUND = 5  # launches of a layer beside its products: two norms, positions, attention, the gate of the MLP (assumed)
F = TypeVar("F", bound=Callable[..., float])


@dataclass(frozen=True)
class PhaseTimes:
    """Times of a model on an instance, for simulators; all in seconds.

    `prefill_s(batch, tokens, context)`: `batch` prompts of which `tokens` each are new, the last of them attending over
    `context`. `decode_s(batch, context)`: one token more of `batch` sequences with `context` tokens each on average.
    `mixed_s(batch, context, tokens, reached)`: a decode step that also takes `tokens` of one prompt, up to `reached`.
    """

    prefill_s: Callable[[float, float, float], float]
    decode_s: Callable[[float, float], float]
    mixed_s: Callable[[float, float, float, float], float]


def kept_results(function: F) -> F:
    """`function`, which remembers its last `KEPT` results (section 3.3.4)."""
    known: dict[tuple[float, ...], float] = {}

    def asked(*arguments: float) -> float:
        found = known.get(arguments)
        if found is None:
            if len(known) >= KEPT:
                known.clear()
            found = known[arguments] = function(*arguments)
        return found

    return asked  # type: ignore[return-value]


def table_times(model: ModelShape, machine: Machine, tensor_parallel: int, *, exchange: bool = True) -> PhaseTimes:
    """BestServe's Algorithm 1 over the paper's operator tables, dispatch times and efficiencies, on `machine`'s peaks.

    The tables are of Llama: ModelError for a model whose layers differ, or whose MLP has no gate. Without `exchange`
    communication takes no time. A mixed step is a prefill after a decode step: the tables have no product of both.
    """
    layer, (peak, memory) = model.layers[0], (machine.peak_flops, machine.peak_memory_bytes_per_s)
    if len(model.layers) > 1 or layer.window or layer.state_nbytes or len(layer.matrices(MLP)) != 3:
        raise ModelError(f"{model.name}: the paper's tables are of Llama's layers; leave --paper out")
    if not peak or not memory:
        raise ModelError(f"machine {machine.name}: the paper's costs need peak_flops and peak_memory_bytes_per_s; "
                         "take a preset, or leave --paper out")
    link = interconnect(machine, tensor_parallel) if exchange else 0.0
    times = {phase: MachineEstimator(attaining(machine, *EFFICIENCY[phase][:2])) for phase in EFFICIENCY}

    def batch_s(phase: str, batch: float, tokens: float, context: float) -> float:
        modules = layer_modules(symbols(layer, batch, tokens, context, tensor_parallel), phase, link)
        return asynchronous_time_s(modules, times[phase], model.n_layers)

    prefill = kept_results(lambda batch, tokens, context: batch_s("prefill", batch, tokens, context))
    decode = kept_results(lambda batch, context: batch_s("decode", batch, 1, context))
    return PhaseTimes(prefill, decode, lambda batch, context, tokens, reached: prefill(1, tokens, reached)
                      + (decode(batch, context) if batch else 0.0))


def interconnect(machine: Machine, tensor_parallel: int) -> float:
    """Bytes per second between devices; ModelError where several are asked for and the machine has no figure."""
    if tensor_parallel > 1 and not machine.interconnect_bytes_per_s:
        raise ModelError(f"machine {machine.name}: interconnect_bytes_per_s is 0, so only --tp 1 can be costed; "
                         "give it in the machine's file")
    return machine.interconnect_bytes_per_s


# Weights split over all devices once, attention over heads: what several ranks run (docs/partitioning.md).
LAYOUT = ChipLayout("1d", (), (), "heads")


@dataclass(frozen=True, eq=False)
class _Sharded:
    """A model on an instance of devices that divide weights, heads and MLP, priced by `partition.layouts`."""

    model: ModelShape
    times: Estimator
    mesh: ChipMesh
    known: dict[tuple[float, float], list[float]] = field(default_factory=dict)  # products, by rows and sequences

    def products_s(self, rows: float, sequences: float) -> list[float]:
        """Return seconds of the head, then of a layer of each kind, with its exchanges and pointwise traffic."""
        if (rows, sequences) not in self.known:
            model, dtype = self.model, self.model.dtype
            found = [outside_cost(model, self.mesh, sequences, self.times, dtype).time_s]
            for kind in model.layers:
                cost = product_cost(kind, LAYOUT, self.mesh, rows, self.times, weights=dtype)
                touched = 2 * rows * kind.activation_elements * model.itemsize / self.mesh.chips
                found.append(cost.time_s + cost.communication_s + self.times.touch_s(touched))
            self.known[rows, sequences] = found
        return self.known[rows, sequences]

    def attended_s(self, kind: LayerShape, work: PhaseWork) -> float:
        cost = attention_cost(kind, LAYOUT, self.mesh, work, self.times, self.model.dtype)
        return cost.time_s + cost.communication_s

    def issued_s(self) -> float:
        return sum(kind.count * (len(kind.matrices(ATTENTION)) + len(kind.matrices(MLP)) + AROUND)
                   for kind in self.model.layers) * self.times.dispatch_s

    def step_s(self, *parts: PhaseWork) -> float:
        """A pass over `parts`: products over all of their tokens at once."""
        busy, *of_layers = self.products_s(sum(part.rows for part in parts), sum(part.batch for part in parts))
        for kind, products in zip(self.model.layers, of_layers, strict=True):
            busy += kind.count * (products + sum(self.attended_s(kind, part) for part in parts))
        return busy + self.issued_s() if self.times.serial else max(busy, self.issued_s())


def instance_mesh(machine: Machine, devices: int) -> ChipMesh:
    """The devices of an instance along one axis; ModelError for several on a machine without an interconnect."""
    interconnect(machine, devices)
    return mesh_of(machine, (devices,))


def shape_times(model: ModelShape, machine: Machine, tensor_parallel: int) -> PhaseTimes:
    """Times from the model's weights and the machine's attained rates, as `forebay partition` prices a layer on one
    device or several: products, attention, what devices exchange; beside it pointwise traffic. Launches are issued
    beside them, on a CPU before them.

    ModelError for several devices on a machine without an interconnect.
    """
    sharded = _Sharded(model, MachineEstimator(machine), instance_mesh(machine, tensor_parallel))

    def mixed(batch: float, context: float, tokens: float, reached: float) -> float:
        decoding = (PhaseWork("decode", batch, 1, context),) if batch else ()
        return sharded.step_s(*decoding, PhaseWork("prefill", 1, tokens, reached))

    return PhaseTimes(
        kept_results(lambda batch, tokens, context: sharded.step_s(PhaseWork("prefill", batch, tokens, context))),
        kept_results(lambda batch, context: sharded.step_s(PhaseWork("decode", batch, 1, context))),
        kept_results(mixed))


def cache_tokens(
    model: ModelShape, machine: Machine, tensor_parallel: int, rows: float = 0, sequences: int = 1
) -> int:
    """Tokens whose K and V fit beside the weights on `tensor_parallel` devices, the states of so many `sequences`, and
    what a step over `rows` tokens works with; 0 or less: the weights do not fit.

    A head of K and V lies on every device that needs it. A window's layers count as full ones, so that this is a bound
    from below.
    """
    mesh, times = instance_mesh(machine, tensor_parallel), MachineEstimator(machine)
    outside = outside_cost(model, mesh, 0, times, model.dtype)
    costs = [(kind.count, product_cost(kind, LAYOUT, mesh, rows, times, weights=model.dtype),
              attention_cost(kind, LAYOUT, mesh, PhaseWork("decode", 1, 1, 1), times, model.dtype))
             for kind in model.layers]
    room = machine.tiers["device"].capacity_nbytes - outside.weights_nbytes - max(
        products.working_nbytes for _, products, _ in costs)
    room -= sum(count * (products.weights_nbytes + sequences * attended.state_nbytes)
                for count, products, attended in costs)
    token_nbytes = sum(count * attended.cache_nbytes for count, _, attended in costs)
    return math.floor(room / token_nbytes) if token_nbytes else ENDLESS if room > 0 else 0


def transfer_s(model: ModelShape, machine: Machine, tensor_parallel: int, tokens: int) -> float:
    """Seconds to bring a prompt's cache from a prefill instance to a decode instance, each device its share.

    Over the interconnect, or where the machine has none, down to the host and up again, one after the other.
    """
    nbytes = (model.kv_nbytes(tokens) + model.state_nbytes) / tensor_parallel
    if machine.interconnect_bytes_per_s:
        return nbytes / machine.interconnect_bytes_per_s
    times = MachineEstimator(machine)
    return nbytes * (times.byte_s("device", "host") + times.byte_s("host", "device"))
