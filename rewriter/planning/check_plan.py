"""Whether a plan, perhaps edited by hand, suits the model: each field that does not is named."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from forebay.kernels.formats.table import packed_caches
from forebay.kernels.operators import find
from forebay.rewriter.ir.alignment import ALIGNMENT, PAGE_NBYTES
from forebay.rewriter.ir.byte_sizes import format_nbytes
from forebay.rewriter.ir.plan import ARENAS, MOVING, Budget, BufferPlacement, Plan, PlanError, Prediction, Workload
from forebay.rewriter.ir.products import Shape
from forebay.rewriter.ir.program import Launch
from forebay.rewriter.ir.schedule.routed_fetch import AHEAD, POOL, pool_room
from forebay.rewriter.planning.arena_layout import slot_stride
from forebay.rewriter.planning.expert_pools import expert_buffers, is_table
from forebay.rewriter.planning.features.table import FEATURES
from forebay.rewriter.planning.model_needs import ModelNeeds
from forebay.rewriter.planning.planner import host_rows_nbytes
from forebay.runtime.devices.kind import DeviceKind

SAME_TIME = 1e-6  # relative: the simulator's own sums, in another order


@dataclass(frozen=True)
class _Expected:
    """The required properties of a buffer, without its address."""

    kind: str
    arena: str
    nbytes: int
    first: int = 0
    last: int = 0


def check_plan(plan: Plan, needs: ModelNeeds, workload: Workload) -> None:
    """Raise PlanError, naming the field, where a valid plan was made for another model or workload, has other weights
    than the model, or other buffers than its steps need, or has them in places that cannot serve."""
    if plan.fingerprint != needs.fingerprint:
        raise PlanError(f"plan.fingerprint: this plan was made for another model (fingerprint {plan.fingerprint}, this "
                        f"one is {needs.fingerprint}); plan again")
    for name, there in asdict(plan.workload).items():
        if there != getattr(workload, name):
            raise PlanError(f"plan.workload.{name}: the model is to run with {getattr(workload, name)}, the plan says "
                            f"{there}; plan again")
    if plan.cache_format != needs.cache_format:
        raise PlanError(f"plan.cache_format: the cache is kept in {needs.cache_format}, the plan says "
                        f"{plan.cache_format}; plan again")
    needs.refuse_chosen_blocks()
    _check_weights(plan, needs)
    _check_schedule(plan, needs)
    _check_buffers(plan, _expected(plan, needs))
    _check_places(plan)


def refuse_cache(name: str, kind: DeviceKind) -> None:
    """Raise PlanError where a device that runs Programs has no kernels for a cache of this format."""
    packed = packed_caches().get(name)
    for operator in () if packed is None or not kind.runs else map(find, (packed.append, packed.attend)):
        if operator is not None and kind.kernels not in operator.bind:
            raise PlanError(f"cache: {name} has no kernel for a {kind.title} ({operator.name}); take another format")


def refuse_launches(launches: Iterable[Launch], kind: DeviceKind) -> None:
    """Raise PlanError where a device that runs Programs has no kernel for one of them."""
    for launch in launches if kind.runs else ():
        operator = find(launch.op)
        refusal = None if operator is None else operator.refusal.get(kind.kernels)
        if refusal is not None and (reason := refusal(launch)):
            raise PlanError(reason)


def require_within(plan: Plan, budget: Budget) -> None:
    """Raise PlanError where a plan may take more than `budget`."""
    if not budget.hold(plan.budget):
        raise PlanError(f"plan.budget: the plan may take {format_nbytes(plan.budget.device)} of device memory and "
                        f"{format_nbytes(plan.budget.host or 0)} of host memory, the run is given "
                        f"{format_nbytes(budget.device)} and {format_nbytes(budget.host or 0)}; plan again")


def check_products(plan: Plan, shapes: set[Shape], known: Mapping[str, Sequence[str]]) -> None:
    """Raise PlanError where the plan's table has other matrix products than those of `shapes`, or implementations that
    are not `known` for their dtype (without an entry: any is)."""
    missing = set(shapes)
    makers = "plan.schedule.prefill_chunks and plan.weights[].tile_rows"
    for i, c in enumerate(plan.gemm):
        shape = c.dtype, c.m, c.n, c.k
        if shape not in missing:
            raise PlanError(f"plan.gemm[{i}]: no matmul has dtype={c.dtype}, m={c.m}, n={c.n}, k={c.k} with "
                            f"{makers} as they are, or it is there twice; plan again")
        missing.remove(shape)
        if c.dtype in known and c.impl not in known[c.dtype]:
            raise PlanError(f"plan.gemm[{i}].impl: {c.impl!r} is not one of {', '.join(known[c.dtype])}, which this "
                            f"machine has for {c.dtype}")
    if missing:
        dtype, m, n, k = min(missing)
        raise PlanError(f"plan.gemm: no implementation for the matmul of {dtype} with m={m}, n={n}, k={k} "
                        f"({len(missing)} in all) with {makers} as they are; add it, or plan again")


def check_prediction(said: Prediction, found: Prediction, same_machine: bool) -> None:
    """Raise PlanError where a plan expects something else than its Programs move or, on the machine that it was
    predicted for, take. A prediction without times is none."""
    if not said.decode_time_s:
        return
    again = "remove plan.prediction to have it made anew"
    if said.streamed_nbytes != found.streamed_nbytes:
        raise PlanError(f"plan.prediction.streamed_nbytes: the plan says {said.streamed_nbytes}, its decode step "
                        f"streams {found.streamed_nbytes}; {again}")
    if not same_machine:
        return
    times = {"prefill_time_s": (said.prefill_time_s, found.prefill_time_s),
             "decode_time_s": (said.decode_time_s, found.decode_time_s)}
    if said.prefill_busy_s:
        times["prefill_busy_s"] = said.prefill_busy_s, found.prefill_busy_s
    for name in ("speculative_times_s", "speculative_busy_s"):
        planned, counted = getattr(said, name), getattr(found, name)
        if len(planned) != len(counted):
            raise PlanError(f"plan.prediction.{name}: the plan has {len(planned)}, its schedule {len(counted)} such "
                            f"steps; {again}")
        times |= {f"{name}[{i}]": pair for i, pair in enumerate(zip(planned, counted, strict=True))}
    for lane in (*found.busy_time_s, *said.busy_time_s):
        times[f"busy_time_s.{lane}"] = said.busy_time_s.get(lane, -1.0), found.busy_time_s.get(lane, -1.0)
    for name, (a, b) in times.items():
        if abs(a - b) > SAME_TIME * max(abs(a), abs(b)):
            raise PlanError(f"plan.prediction.{name}: the plan says {a:.6g} s, its Programs give {b:.6g} s; {again}")
    for name in ("peak_nbytes", "bottleneck"):
        if getattr(said, name) != getattr(found, name):
            raise PlanError(f"plan.prediction.{name}: the plan says {getattr(said, name)}, its Programs give "
                            f"{getattr(found, name)}; {again}")


def _check_weights(plan: Plan, needs: ModelNeeds) -> None:
    used = {u.name: u for u in needs.uses}
    pieces: dict[int, int] = {}  # bytes that stream at once, by the weight's number
    for i, w in enumerate(plan.weights):
        at, use = f"plan.weights[{i}]", used.pop(w.name, None)
        if use is None:
            raise PlanError(f"{at}.name: the model has no weight {w.name}; plan again")
        for name in ("nbytes", "format"):
            if getattr(w, name) != getattr(use, name):
                raise PlanError(f"{at}.{name}: {w.name} has {w.nbytes} bytes in format {w.format}, but the model's has "
                                f"{use.nbytes} in format {use.format}; plan again")
        buffers = [b.arena for b in plan.buffers if b.name == w.name]
        if buffers != ([] if w.tier == "disk" else [w.tier]):
            raise PlanError(f"{at}.tier: {w.name} is to lie on the {w.tier}, and plan.buffers has "
                            f"{'none of that name' if not buffers else f'one in the arena of the {buffers[0]}'}; plan "
                            "again")
        if w.in_place and needs.rates.in_place_s is None:
            raise PlanError(f"{at}.in_place: kernels of {plan.machine or 'this machine'} do not read host memory (its "
                            "profile has no host_read_bytes_per_s); plan again")
        if w.gather != (use.lookup and w.streams):
            raise PlanError(f"{at}.gather: {w.name} is {'' if use.lookup else 'not '}read by row, and is on the "
                            f"{w.tier}; plan again")
        if w.tile_rows and (w.tier == "device" or not use.product or not use.tileable):
            raise PlanError(f"{at}.tile_rows: {w.name} cannot be streamed in row tiles; it must be 0")
        if w.tile_rows >= use.rows and w.tile_rows:
            raise PlanError(f"{at}.tile_rows: {w.name} has {use.rows} rows; 0 streams it whole")
        if w.pool_slots and not (is_table(use) and w.pool_slots < use.rows):
            raise PlanError(f"{at}.pool_slots: {w.name} has {use.rows} rows, and is {'' if is_table(use) else 'no '}"
                            "table of experts; only a table has a pool, of fewer of them")
        if w.on_host and not is_table(use):
            raise PlanError(f"{at}.on_host: {w.name} is no table of experts, and the host computes with those alone")
        pools = [b.nbytes for b in plan.buffers if b.name == w.name + POOL]
        room = pool_room(w.nbytes // max(1, use.rows), needs.host_hop)
        if pools != ([w.pool_slots * room] if w.pool_slots else []):
            raise PlanError(f"{at}.pool_slots: {w.pool_slots} slots are not the nbytes of what plan.buffers has of the "
                            f"name {w.name + POOL}, {pools}; plan again")
        if w.streams and use.product:
            pieces[i] = use.nbytes // max(1, use.rows) * (w.tile_rows or use.rows)
    if used:
        raise PlanError(f"plan.weights: the model's {next(iter(used))} is missing ({len(used)} in all); plan again")
    largest = max(pieces, key=lambda i: pieces[i], default=-1)
    if pieces.get(largest, 0) != plan.schedule.slot_nbytes:
        raise PlanError(f"plan.schedule.slot_nbytes: the largest piece that streams is {pieces.get(largest, 0)} bytes "
                        f"(plan.weights[{largest}].tile_rows), the plan says {plan.schedule.slot_nbytes}")


def _check_schedule(plan: Plan, needs: ModelNeeds) -> None:
    s = plan.schedule
    if s.host_hop != needs.host_hop:
        raise PlanError(f"plan.schedule.host_hop: it must be {str(needs.host_hop).lower()} on this device; plan again")
    pooled = {w.name for w in plan.weights if w.pool_slots}
    room = max((pool_room(u.nbytes // u.rows, s.host_hop) for u in needs.uses if u.name in pooled), default=0)
    if (nbytes := sum(b.nbytes for b in plan.buffers if b.name == AHEAD)) != s.routed.ahead * room:
        raise PlanError(f"plan.schedule.routed.ahead: {s.routed.ahead} experts of {room} bytes are not the {nbytes} "
                        f"bytes of what plan.buffers has of the name {AHEAD}; plan again")
    for feature, settings in asdict(s.batching).items():
        record = getattr(needs.batching, feature)
        for name, there in settings.items() if isinstance(settings, dict) else ():
            if there != (must := getattr(record, name)):
                raise PlanError(f"plan.schedule.batching.{feature}.{name}: the model is to run with {must}, the plan "
                                f"says {there}; plan again")
    _check_features(plan, needs)
    slots = [b for b in plan.buffers if b.kind == "slot" and b.arena == "device" and b.name.startswith("slot")]
    if s.slots != len(slots):
        raise PlanError(f"plan.schedule.slots: {s.slots} slots need as many buffers of kind slot in the device arena, "
                        f"plan.buffers has {len(slots)}")
    if any(b.nbytes != slot_stride(s.slot_nbytes) for b in slots):
        raise PlanError(f"plan.schedule.slot_nbytes: slots of {s.slot_nbytes} bytes take buffers of "
                        f"{slot_stride(s.slot_nbytes)} bytes, which is not the nbytes of those in plan.buffers")
    for name in ("prefill_chunks", "speculative_steps"):
        for i, tokens in enumerate(sizes := getattr(s, name)):
            layout, largest = needs.need(tokens).layout, needs.need(sizes[0]).layout
            if layout is not None and largest is not None and not layout.within(largest):
                raise PlanError(f"plan.schedule.{name}[{i}]: steps over {tokens} tokens need other buffers than those "
                                f"over {sizes[0]}; leave it out")


def _check_features(plan: Plan, needs: ModelNeeds) -> None:
    known, batching = {feature.name for feature in FEATURES}, plan.schedule.batching
    for setting in batching.extensions:
        if setting.partition(".")[0] not in known:
            raise PlanError(f"plan.schedule.batching.extensions: {setting!r} is of no feature that is registered")
    if batching.extensions != needs.batching.extensions:
        raise PlanError(f"plan.schedule.batching.extensions: the model is to run with {needs.batching.extensions}, the "
                        f"plan says {batching.extensions}; plan again")
    for feature in FEATURES:
        if fault := feature.check(plan):
            raise PlanError(f"plan.schedule.batching.{fault}")


def _expected(plan: Plan, needs: ModelNeeds) -> dict[tuple[str, str], _Expected]:
    """Every buffer that the plan must have, by name and phase."""
    found = {(w.name, "all"): _Expected("weight", w.tier, w.nbytes) for w in plan.weights if w.tier != "disk"}
    found |= {(name, "all"): _Expected("constant", "device", nbytes) for name, nbytes in needs.constants.items()}
    staged = needs.staged.buffers() if needs.staged is not None else ()
    features = needs.feature_buffers(plan.schedule.prefill_chunk)
    for name, kind, arena, nbytes, _ in (*expert_buffers(plan, needs), *staged, *features):
        found[name, "all"] = _Expected(kind, arena, nbytes)
    stride = slot_stride(plan.schedule.slot_nbytes)
    for i in range(plan.schedule.slots):
        found[f"slot{i}", "all"] = _Expected("slot", "device", stride)
        if plan.schedule.host_hop:
            found[f"host_slot{i}", "all"] = _Expected("slot", "host", stride)
    whole = [b.phase == "all" for b in plan.buffers if b.kind == "cache"]
    overlays = 2 * sum(whole) < len(whole)
    for phase, sizes in {"prefill": needs.cache_prompt, "decode": needs.cache}.items() if overlays else (
            ("all", needs.cache),):
        found |= {(name, phase): _Expected("cache", "device", nbytes) for name, nbytes in sizes.items()}
    if plan.schedule.host_hop and any(w.gather for w in plan.weights):
        found["host_rows", "all"] = _Expected("io", "host", host_rows_nbytes(needs, plan.schedule.prefill_chunk))
    for phase, tokens in plan.schedule.largest_steps.items():
        layout = needs.need(tokens).layout
        for b in layout.buffers.values() if layout is not None else ():
            found[b.name, phase] = _Expected(b.kind, "device", b.nbytes, b.first, b.last)
    return found


def _check_buffers(plan: Plan, expected: dict[tuple[str, str], _Expected]) -> None:
    """Every buffer is one that is expected, and all that are expected are there."""
    missing = dict(expected)
    chunks = f" (plan.schedule.prefill_chunks begins with {plan.schedule.prefill_chunk})"
    sized = plan.schedule.host_hop or plan.schedule.batching.hidden.tier != "device"  # kept throughout
    because = {"prefill": chunks, "all": chunks if sized else ""}
    for i, b in enumerate(plan.buffers):
        must = missing.pop((b.name, b.phase), None)
        if must is None:
            field = "phase" if any(name == b.name for name, _ in missing) else "name"
            raise PlanError(f"plan.buffers[{i}].{field}: no step needs a buffer {b.name} in phase {b.phase}, or it is "
                            "there twice; plan again")
        for field in ("kind", "arena", "nbytes", "first", "last"):
            if getattr(b, field) != getattr(must, field):
                raise PlanError(f"plan.buffers[{i}].{field}: {b.name} needs a {must.kind} buffer of {must.nbytes} "
                                f"bytes in the {must.arena} arena, live over steps {must.first} to {must.last}"
                                f"{because.get(b.phase, '')}; the plan's {field} is {getattr(b, field)}; plan again")
    for (name, phase), must in missing.items():
        raise PlanError(f"plan.buffers: {name} needs a {must.kind} buffer of {must.nbytes} bytes in the {must.arena} "
                        f"arena in phase {phase}{because.get(phase, '')}, the plan has none; plan again")


def _check_places(plan: Plan) -> None:
    """Buffers lie aligned, in their arenas, and where nothing else is alive; a cache only moves up."""
    if "device" not in plan.arenas:
        raise PlanError("plan.arenas.device: there is none")
    for tier, nbytes in plan.arenas.items():
        limit = {"device": plan.budget.device, "host": plan.budget.host}.get(tier, 0)
        if limit is not None and nbytes > limit:
            raise PlanError(f"plan.arenas.{tier}, plan.budget.{tier}: the {tier} arena takes {nbytes} bytes, {limit} "
                            "are allowed")
    number = {id(b): i for i, b in enumerate(plan.buffers)}
    for i, b in enumerate(plan.buffers):
        afar = b.arena not in ARENAS  # in a file, which is as long as it must be
        step = PAGE_NBYTES if b.kind == "slot" or b.name == "host_rows" or afar else ALIGNMENT
        if b.offset % step or (b.offset + b.nbytes > plan.arenas.get(b.arena, 0) and not afar):
            raise PlanError(f"plan.buffers[{i}].offset: {b.name} [{b.offset}:+{b.nbytes}] must lie in the {b.arena} "
                            f"arena of {plan.arenas.get(b.arena, 0)} bytes (plan.arenas.{b.arena}), at a multiple of "
                            f"{step}")
    for phase in ("prefill", "decode", "speculative"):
        for b, other in _meetings(plan.buffers_of(phase)):
            raise PlanError(f"plan.buffers[{number[id(b)]}].offset: during {phase} {b.name} would lie on {other.name}, "
                            "which is alive at the same time")
    wide = {b.name: b for b in plan.buffers if b.kind == "cache" and b.phase == "decode"}
    for i, b in enumerate(plan.buffers):
        if b.kind == "cache" and b.phase == "prefill" and b.offset > wide[b.name].offset:
            raise PlanError(f"plan.buffers[{i}].offset: {b.name} lies higher during prefill than later; a cache only "
                            "moves up")


def _meetings(buffers: Sequence[BufferPlacement]) -> Iterator[tuple[BufferPlacement, BufferPlacement]]:
    """Pairs that share bytes while both are alive; what does not come and go is alive throughout."""
    ordered = sorted((b for b in buffers if b.nbytes), key=lambda b: (b.arena, b.offset))
    open_: list[BufferPlacement] = []
    for b in ordered:
        open_ = [o for o in open_ if o.arena == b.arena and o.offset + o.nbytes > b.offset]
        for other in open_:
            comes = [x for x in (b, other) if x.kind in MOVING and x.phase != "all"]
            apart = b.phase == other.phase and (b.first > other.last or other.first > b.last)
            if len(comes) < 2 or not apart:
                yield b, other
        open_.append(b)
