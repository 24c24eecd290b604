"""Seconds of a batch's prefill and of one of its decode steps, from the one cost library, kept by their arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from forebay.kernels.attention.operations import attention_flops
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.predict.estimator import Estimator, MachineEstimator
from forebay.rewriter.predict.model_shapes import ATTENTION, MLP, LayerShape, ModelError, ModelShape
from forebay.rewriter.predict.roofline import asynchronous_time_s, attaining
from forebay.rewriter.serving.llama_tables import EFFICIENCY, layer_modules, symbols

KEPT = 1 << 16  # results per function: a search asks for a few hundred, a trace for as many as it has lengths
AROUND = 5  # launches of a layer beside its products: two norms, positions, attention, the gate of the MLP (assumed)
F = TypeVar("F", bound=Callable[..., float])


@dataclass(frozen=True)
class PhaseTimes:
    """What simulators ask of a model on an instance; all in seconds.

    `prefill_s(batch, tokens, context)`: `batch` prompts of which `tokens` each are new, the last of them attending over
    `context`. `decode_s(batch, context)`: one token more of `batch` sequences with `context` tokens each on average.
    `mixed_s(batch, context, tokens, reached)`: a decode step that also takes `tokens` of one prompt, up to `reached`.
    """

    prefill_s: Callable[[float, float, float], float]
    decode_s: Callable[[float, float], float]
    mixed_s: Callable[[float, float, float, float], float]


def _kept(function: F) -> F:
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
    if len(model.layers) > 1 or layer.window or len(layer.matrices(MLP)) != 3:
        raise ModelError(f"{model.name}: the paper's tables are of Llama's layers; leave --paper out")
    if not peak or not memory:
        raise ModelError(f"machine {machine.name}: the paper's costs need peak_flops and peak_memory_bytes_per_s; "
                         "take a preset, or leave --paper out")
    link = interconnect(machine, tensor_parallel) if exchange else 0.0
    times = {phase: MachineEstimator(attaining(machine, *EFFICIENCY[phase][:2])) for phase in EFFICIENCY}

    def batch_s(phase: str, batch: float, tokens: float, context: float) -> float:
        modules = layer_modules(symbols(layer, batch, tokens, context, tensor_parallel), phase, link)
        return asynchronous_time_s(modules, times[phase], model.n_layers)

    prefill = _kept(lambda batch, tokens, context: batch_s("prefill", batch, tokens, context))
    decode = _kept(lambda batch, context: batch_s("decode", batch, 1, context))
    return PhaseTimes(prefill, decode, lambda batch, context, tokens, reached: prefill(1, tokens, reached)
                      + (decode(batch, context) if batch else 0.0))


def interconnect(machine: Machine, tensor_parallel: int) -> float:
    """Bytes per second between devices; ModelError where several are asked for and the machine has no figure."""
    if tensor_parallel > 1 and not machine.interconnect_bytes_per_s:
        raise ModelError(f"machine {machine.name}: interconnect_bytes_per_s is 0, so only --tp 1 can be costed; "
                         "give it in the machine's file")
    return machine.interconnect_bytes_per_s


@dataclass(frozen=True, eq=False)
class _Sharded:
    """Layers on one of `t` devices that divide weights, heads and MLP (Megatron's tensor parallelism)."""

    model: ModelShape
    times: Estimator
    link: float
    t: int
    known: dict[tuple[float, float], list[float]] = field(default_factory=dict)  # products, by rows and sequences

    def products_s(self, kind: LayerShape, rows: float) -> float:
        itemsize = self.model.itemsize
        return sum(self.times.product_s(self.model.dtype, rows * kind.active_share(stage), max(1, n // self.t), k,
                                        nbytes=n * k * itemsize / self.t)
                   for stage in (ATTENTION, MLP) for n, k in kind.matrices(stage))

    def attend_s(self, kind: LayerShape, batch: float, tokens: float, context: float) -> float:
        seen = min(context, kind.window + tokens - 1) if kind.window else context
        flops = batch * attention_flops(1, kind.heads, tokens, context, kind.head_dim, kind.window)
        nbytes = batch * seen * kind.kv_elements * self.model.itemsize
        return self.times.attention_s(self.model.dtype, nbytes / self.t, flops / self.t)

    def exchange_s(self, kind: LayerShape, rows: float) -> float:
        """One all-reduce by a ring: each device sends and receives 2 (t - 1) / t of the sum's bytes."""
        nbytes = rows * kind.hidden * self.model.itemsize
        return 2 * (self.t - 1) / self.t * nbytes / self.link if self.t > 1 else 0.0

    def head_s(self, sequences: float) -> float:
        hidden = self.model.layers[0].hidden
        rows = max(1, self.model.head_elements // hidden // self.t)
        return self.times.product_s(self.model.dtype, sequences, rows, hidden,
                                    nbytes=self.model.head_elements * self.model.itemsize / self.t)

    def issued_s(self) -> float:
        return sum(kind.count * (len(kind.matrices(ATTENTION)) + len(kind.matrices(MLP)) + AROUND)
                   for kind in self.model.layers) * self.times.dispatch_s

    def step_s(self, parts: tuple[tuple[float, float, float], ...]) -> float:
        """A pass over `parts`, each (sequences, tokens of each, context): products over all of their tokens at once."""
        rows, sequences = sum(b * n for b, n, _ in parts), sum(b for b, _, _ in parts)
        if (rows, sequences) not in self.known:
            self.known[rows, sequences] = [self.head_s(sequences),
                                           *(self.products_s(kind, rows) for kind in self.model.layers)]
        busy, *of_layers = self.known[rows, sequences]
        for kind, products in zip(self.model.layers, of_layers, strict=True):
            attend = sum(self.attend_s(kind, *part) for part in parts)
            touched = self.times.touch_s(2 * rows * kind.activation_elements * self.model.itemsize / self.t)
            busy += kind.count * (products + attend + touched + 2 * self.exchange_s(kind, rows))
        return busy + self.issued_s() if self.times.serial else max(busy, self.issued_s())


def shape_times(model: ModelShape, machine: Machine, tensor_parallel: int) -> PhaseTimes:
    """Times from the model's weights and the machine's attained rates: products, attention, pointwise traffic, and an
    all-reduce after each stage; launches are issued beside them, on a CPU before them.

    ModelError for several devices on a machine without an interconnect.
    """
    sharded = _Sharded(model, MachineEstimator(machine), interconnect(machine, tensor_parallel), tensor_parallel)

    def mixed(batch: float, context: float, tokens: float, reached: float) -> float:
        decoding = ((batch, 1.0, context),) if batch else ()
        return sharded.step_s((*decoding, (1.0, tokens, reached)))

    return PhaseTimes(_kept(lambda batch, tokens, context: sharded.step_s(((batch, tokens, context),))),
                      _kept(lambda batch, context: sharded.step_s(((batch, 1.0, context),))), _kept(mixed))


def cache_tokens(model: ModelShape, machine: Machine, tensor_parallel: int) -> int:
    """Tokens whose K and V fit beside the weights on `tensor_parallel` devices; 0 or less: the weights do not fit.

    A window's layers count as full ones, so that this is a bound from below.
    """
    room = tensor_parallel * machine.tiers["device"].capacity_nbytes - model.weight_nbytes
    per_token = model.itemsize * sum(kind.count * kind.kv_elements for kind in model.layers)
    return math.floor(room / per_token)


def transfer_s(model: ModelShape, machine: Machine, tensor_parallel: int, tokens: int) -> float:
    """Seconds to bring a prompt's cache from a prefill instance to a decode instance, each device its share.

    Over the interconnect, or where the machine has none, down to the host and up again, one after the other.
    """
    nbytes = model.kv_nbytes(tokens) / tensor_parallel
    if machine.interconnect_bytes_per_s:
        return nbytes / machine.interconnect_bytes_per_s
    times = MachineEstimator(machine)
    return nbytes * (times.byte_s("device", "host") + times.byte_s("host", "device"))
