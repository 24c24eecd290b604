"""Ways to serve: so many instances of so many devices, of one kind or two, or one device that streams; and how each is
simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.predict.estimator import MachineEstimator
from forebay.rewriter.predict.model_shapes import ModelError, ModelShape
from forebay.rewriter.serving.collocated import collocated
from forebay.rewriter.serving.offloaded import Streamed, offloaded_times, streamed, with_checkpoints
from forebay.rewriter.serving.phase_times import PhaseTimes, cache_tokens, shape_times, table_times, transfer_s
from forebay.rewriter.serving.request_level import answer_s, disaggregated, prompts_s
from forebay.rewriter.serving.served import Served
from forebay.rewriter.serving.token_level import InstanceLimits, token_level, token_level_tandem
from forebay.rewriter.serving.traffic import Arrival, Traffic, TrafficError

# Sequences at once that are tried of a device that streams, by whether their caches lie in host memory.
BATCHES = {False: (1, 4, 16, 64), True: (4, 16, 64, 256)}


@dataclass(frozen=True)
class Strategy:
    """Instances of `tensor_parallel` devices: `both` that do both phases, or `prefill` and `decode` apart (named 2m
    and 1p1d, as the paper does); `offloaded` is one device that streams weights, for so many sequences at once, whose
    caches lie on it, or if `staged` in host memory, a share of them as checkpoints where that is faster."""

    tensor_parallel: int = 1
    both: int = 0
    prefill: int = 0
    decode: int = 0
    offloaded: int = 0
    staged: bool = False

    @property
    def devices(self) -> int:
        return self.tensor_parallel * (self.both + self.prefill + self.decode) + (1 if self.offloaded else 0)

    @property
    def name(self) -> str:
        if self.offloaded:
            return f"1 offloaded, batch {self.offloaded}" + (", cache on host" if self.staged else "")
        kind = f"{self.both}m" if self.both else f"{self.prefill}p{self.decode}d"
        return f"{kind} tp{self.tensor_parallel}"


@dataclass(frozen=True)
class ServiceWanted:
    """The requested service: a model, a machine that each device is, traffic, and limits of an instance.

    `prefill_batch` prompts are computed at once, `batch` sequences decode at once (Table 4's 4 and 16); with `paper`
    BestServe's operators and simulators, which know no memory, else the machine's attained rates and single steps.
    `budget_nbytes` is of the device that offloads, 0 all of it; that device may be one of another machine. `positions`
    is the most tokens of a prompt and its answer that the model takes, 0 where no limit is known.
    """

    model: ModelShape
    machine: Machine
    traffic: Traffic
    batch: int = 16
    prefill_batch: int = 4
    chunk: int = 0
    shared_prefix: int = 0
    paper: bool = False
    budget_nbytes: int = 0
    offload_machine: Machine | None = None
    positions: int = 0

    @property
    def streams_on(self) -> Machine:
        return self.offload_machine or self.machine


Simulate = Callable[[Sequence[Arrival], int], Served]


@dataclass(frozen=True)
class Simulated:
    """How a strategy is simulated, and the least seconds that one request takes under it, alone."""

    simulate: Simulate
    alone_s: float


def simulated(strategy: Strategy, service: ServiceWanted) -> Simulated:
    """ModelError or TrafficError where a strategy cannot serve: its devices hold too little, or have no link."""
    request = Arrival(0.0, service.traffic.prompt, service.traffic.output)
    if strategy.offloaded:
        return _offloaded(strategy, service, request)
    make = table_times if service.paper else shape_times
    times = make(service.model, service.machine, strategy.tensor_parallel)
    alone = prompts_s([request], times) + answer_s(request, 0, times)
    if service.paper:
        return Simulated(_as_the_paper(strategy, service, times), alone)
    rows = service.chunk or service.prefill_batch * service.traffic.prompt
    held = cache_tokens(service.model, service.machine, strategy.tensor_parallel, rows, service.batch)
    if held <= 0:
        raise ModelError(f"{service.model.name} does not fit {strategy.tensor_parallel} x {service.machine.name} "
                         f"together with steps over {rows} tokens; more devices (--tp), or a smaller --prefill-batch "
                         "or --chunk, may do")
    limits = _limits(service, service.batch, held)
    if strategy.both:
        limits.validate([request], "both")
        return Simulated(lambda requests, seed: token_level(requests, times, strategy.both, limits), alone)
    before = replace(limits, batch=service.prefill_batch, chunk=0)
    moved = cache(lambda tokens: transfer_s(service.model, service.machine, strategy.tensor_parallel, tokens))
    limits.validate([request], "decode")
    return Simulated(lambda requests, seed: token_level_tandem(
        requests, (times, strategy.prefill, before), (times, strategy.decode, limits), moved), alone)


def _limits(service: ServiceWanted, batch: int, held: int) -> InstanceLimits:
    """Return the limits of an instance that holds so many tokens of cache; a prefill takes no more than `prefill_batch`
    mean prompts."""
    return InstanceLimits(batch, held, service.prefill_batch * service.traffic.prompt, service.chunk,
                  shared_prefix=service.shared_prefix)


def _as_the_paper(strategy: Strategy, service: ServiceWanted, times: PhaseTimes) -> Simulate:
    if strategy.both:
        return lambda requests, seed: collocated(requests, times, strategy.both, service.prefill_batch, seed)
    return lambda requests, seed: disaggregated(requests, (times, strategy.prefill, service.prefill_batch),
                                                (times, strategy.decode, service.batch), seed)


def _offloaded(strategy: Strategy, service: ServiceWanted, request: Arrival) -> Simulated:
    away = streams(strategy, service)
    times = offloaded_times(service.model, service.streams_on, away)
    limits = _limits(service, strategy.offloaded, away.cache_tokens)
    alone = prompts_s([request], times) + answer_s(request, 0, times)
    return Simulated(lambda requests, seed: token_level(requests, times, 1, limits), alone)


def streams(strategy: Strategy, service: ServiceWanted) -> Streamed:
    """Return the bytes that an offloading device streams; ModelError where it holds too little."""
    if service.paper:
        raise ModelError("the paper's costs know no streaming; leave --paper out to compare with offloading")
    machine, traffic = service.streams_on, service.traffic
    if strategy.staged and MachineEstimator(machine).serial:
        raise ModelError(f"machine {machine.name}: a CPU's caches lie in its own memory")
    longest = max((request_tokens(r) for r in traffic.trace), default=traffic.prompt + traffic.output)
    spread = 1 + 2 * traffic.length_cv  # of the mean: what most answers stay below
    tokens = int(strategy.offloaded * (traffic.prompt + traffic.output) * spread) + longest + 16
    away = streamed(service.model, machine, tokens, service.budget_nbytes, strategy.staged, strategy.offloaded)
    if not strategy.staged or service.model.state_nbytes:  # checkpoints are of K and V alone
        return away
    return with_checkpoints(service.model, machine, away, strategy.offloaded, traffic.prompt + traffic.output / 2)


def request_tokens(request: Arrival) -> int:
    """Tokens of cache that a request takes at its end."""
    return request.prompt + request.output


def strategies(
    service: ServiceWanted, devices: int, tensor_parallel: Sequence[int] = (1, 2, 4, 8), instances: int = 5
) -> tuple[list[Strategy], dict[str, str]]:
    """List the strategies for at most so many devices and instances that can serve (section 3.5), and why others
    cannot, by the devices of an instance or "offloaded". One device that streams is among them where the model does not
    fit one, or a budget was given."""
    found: list[Strategy] = []
    refused: dict[str, str] = {}
    for t in tensor_parallel:
        most = min(instances, devices // t)
        own = [Strategy(t, both=m) for m in range(1, most + 1)]
        own += [Strategy(t, prefill=p, decode=d) for p in range(1, most) for d in range(1, most - p + 1)]
        try:
            if not own:
                raise ModelError(f"an instance takes more than the {devices} devices there are (--gpus)")
            simulated(own[0], service)
            found += own
        except (ModelError, TrafficError) as error:
            refused[f"tp {t}"] = str(error)
    alone = service.budget_nbytes or service.offload_machine or (
        not service.paper and cache_tokens(service.model, service.machine, 1) <= 0)
    for own_way in (Strategy(offloaded=batch, staged=staged) for staged, batches in BATCHES.items()
                    for batch in batches) if alone and not service.paper else ():
        try:
            simulated(own_way, service)
            found.append(own_way)
        except (ModelError, TrafficError, KeyError) as error:
            refused[own_way.name[2:]] = str(error)
    return found, refused
