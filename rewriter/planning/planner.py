"""Decide where everything goes: fill the fast tier, stream the rest, issue copies as far ahead as the slots allow."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from forebay.rewriter.ir.alignment import PAGE_NBYTES, aligned
from forebay.rewriter.ir.byte_sizes import format_nbytes
from forebay.rewriter.ir.plan import Budget, Limits, Plan, PlanError, Prediction, Schedule, Workload
from forebay.rewriter.ir.prefill_chunks import SHORTEST_CHUNK, chunk_sizes, chunk_steps, halvings
from forebay.rewriter.ir.program import DISK, UPLOAD
from forebay.rewriter.planning.arena_layout import lay_out, slot_stride
from forebay.rewriter.planning.expert_pools import expert_buffers, is_table
from forebay.rewriter.planning.forced_options import forceable, forced, needs_less
from forebay.rewriter.planning.model_needs import ModelNeeds, WeightUse
from forebay.rewriter.planning.options import Options, make_options
from forebay.rewriter.planning.spread_resident import halving_order, spread_resident
from forebay.rewriter.planning.step_streams import ChunkRoom, StepStreams, WeightKinds, kinds_of, with_pools
from forebay.rewriter.planning.tiles import most_tiles, room_beside_slots
from forebay.rewriter.planning.weight_places import fill_host, place_weight, read_in_place

# What may be chosen. None of it depends on the budget, so that whatever works with less works with more.
SLOTS = (1, 2, 3, 4, 6, 8)
HUGE_TILES = 16  # of weights so large that tiles of the largest slots would be tens of thousands of copies a step
REUSED_CHUNK = 64  # tokens, of which prompts that begin alike need not compute whole chunks again
MAX_REUSE_RATIO = 1.05  # times the least predicted time, for such chunks to be shorter
GROWTH_PARTS = 128  # a cache of 32 layers that grows by this part of itself moves in 1000 copies, by a token in 7000


def make_plan(needs: ModelNeeds, budget: Budget, workload: Workload, options: Options, machine: str) -> Plan:
    """The plan that is predicted to take prompt and answer the least time; PlanError names the smallest budget that
    works.

    Candidates are prefill chunks (of the prompt halved again and again) x slots x slot sizes; each leaves other room
    for resident weights. They are compared by `Rates.step_time_s`, and none of them gets worse with more budget.
    """
    needs.refuse_chosen_blocks()
    if options.cpu_experts and not needs.host_hop:
        raise PlanError(f"cpu_experts={options.cpu_experts}: without a GPU the CPU computes all experts; leave it out")
    if options.experts_ahead and needs.host_hop:
        raise PlanError(f"experts_ahead={options.experts_ahead}: with a GPU no experts are read ahead; leave it out")
    kinds, held = kinds_of(needs, workload, options.expert_hits), needs.host_nbytes
    if budget.host is not None and held > budget.host:
        raise PlanError(f"budget.host: {format_nbytes(budget.host)} cannot hold the {format_nbytes(held)} ({held} "
                        "bytes) of cache that are to lie in host memory (plan.schedule.batching.cache.on_host); give "
                        "more")
    best = _cheapest(needs, kinds, budget, workload, list(_candidates(needs, kinds, budget, workload, options)),
                     MAX_REUSE_RATIO if options.keeps_prompts else 1.0)
    if best is None:
        refuse_forced(needs, budget, workload, options)
        smallest, parts = smallest_budget(needs, workload, options)
        hidden = needs.feature_nbytes(options.prefill_chunk or _shortest(needs, workload.prompt), "host")
        shared = (options.weight_shares or (0, 0))[1]
        if budget.device >= smallest and (budget.host or hidden or shared or options.cpu_experts):
            what = "hidden states that wait there" if hidden else f"{shared:.0%} of the weights" if shared else (
                f"experts of {options.cpu_experts} layers" if options.cpu_experts else
                "slots that copies from disk pass through on their way to the device")
            instead = "name a smaller share" if shared else "leave the host budget out"
            raise PlanError(f"budget.host: {format_nbytes(budget.host or 0)} cannot hold the {what}; give more, or "
                            + instead)
        raise PlanError(
            f"a device budget of {format_nbytes(budget.device)} cannot work for batch {workload.batch}, prompt "
            f"{workload.prompt}, {workload.new_tokens} new tokens; the smallest that can is {format_nbytes(smallest)} "
            f"({smallest} bytes: {', '.join(f'{k} {format_nbytes(v)}' for k, v in parts.items())}). "
            + needs_less(workload, options))
    return _planned(needs, kinds, budget, workload, options, machine, best)


def plan_fits(needs: ModelNeeds, budget: Budget, workload: Workload, options: Options) -> bool:
    """Return whether there is a plan for `budget`."""
    held = needs.host_nbytes
    return (budget.host is None or held <= budget.host) and any(
        _candidates(needs, kinds_of(needs, workload, options.expert_hits), budget, workload, options))


def smallest_budget(needs: ModelNeeds, workload: Workload, options: Options) -> tuple[int, dict[str, int]]:
    """The least device budget in bytes that a plan exists for, and what takes it; PlanError where none is enough."""
    kinds = kinds_of(needs, workload, options.expert_hits)
    least = replace(options, prefill_chunk=options.prefill_chunk or _shortest(needs, workload.prompt))

    in_host = ((options.expert_slots or options.cpu_experts) and needs.host_hop) or (options.weight_shares or (0, 0))[1]
    host = 1 << 60 if in_host else None  # on a GPU pools are filled from there

    def fits(nbytes: int) -> Iterator[ChunkRoom]:
        return _candidates(needs, kinds, Budget(nbytes, host), workload, least)

    if not _chunks(needs, workload, least):
        raise PlanError(f"prefill_chunk: steps over {needs.speculative} tokens check drafts; name another chunk")
    high = 1 << 20
    while not any(fits(high)):
        if high >= 1 << 60:
            raise PlanError(f"{forced(options)}: no budget is enough for this model; leave some of these out")
        high *= 2
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if any(fits(middle)) else (middle, high)
    found = list(fits(high))
    best = _cheapest(needs, kinds, Budget(high), workload, found)
    plan = _planned(needs, kinds, Budget(high), workload, options, "", best or found[0])
    parts: dict[str, int] = {}
    for b in plan.buffers_of("decode"):
        if b.arena == "device":
            parts[b.kind] = parts.get(b.kind, 0) + b.nbytes
    chunk = plan.schedule.prefill_chunk
    upper, _ = _upper(needs, chunk)
    parts["activation"] = min(host_rows_nbytes(needs, chunk),
                              upper - _aligned(needs.cache))  # less where the cache takes the rest over
    parts["workspace"] = needs.workspace(chunk)
    return high, parts


def refuse_forced(needs: ModelNeeds, budget: Budget, workload: Workload, options: Options) -> None:
    """Raise PlanError, naming what is forced, for a budget that would be enough without it."""
    for name in ("expert_slots", "experts_ahead", "cpu_experts"):
        if (asked := getattr(options, name)) and not any(map(is_table, needs.uses)):
            raise PlanError(f"{name}={asked}: the model has no experts that steps could read by name; leave it out")
    free, _ = smallest_budget(needs, workload, make_options(dict.fromkeys(forceable(options)), options))
    needed, _ = smallest_budget(needs, workload, options)
    if free <= budget.device < needed:
        raise PlanError(f"{forced(options)} cannot work within a device budget of {format_nbytes(budget.device)} "
                        f"({budget.device} bytes): it needs {format_nbytes(needed)} ({needed} bytes); left to the "
                        f"planner, {format_nbytes(free)} do")


def _chunks(needs: ModelNeeds, workload: Workload, options: Options) -> list[int]:
    """The tokens per sequence that a chunk of the prompt may have, the largest first."""
    shortest = _shortest(needs, workload.prompt)
    chunks = [min(options.prefill_chunk, workload.prompt)] if options.prefill_chunk else [
        *(chunk for chunk in halvings(workload.prompt) if chunk > shortest), shortest]
    return [chunk for chunk in chunks if chunk not in needs.speculative]


def _candidates(
    needs: ModelNeeds, kinds: WeightKinds, budget: Budget, workload: Workload, options: Options
) -> Iterator[ChunkRoom]:
    """Every way to spend the budget that is worth a look, larger chunks first."""
    choices = _slot_choices(kinds, options, needs)
    cached, (most, host_most) = needs.host_nbytes, _asked_shares(needs, kinds, options)
    all_stay = most >= kinds.products_nbytes
    hops = budget.host and needs.weight_tier == "disk" and needs.host_hop
    for chunk in _chunks(needs, workload, options):
        upper, _ = _upper(needs, chunk)
        fixed = upper + needs.workspace(chunk) + _aligned(needs.constants)
        fixed += needs.staged.device_nbytes if needs.staged is not None else 0
        fixed += needs.feature_nbytes(chunk, "device")
        room = budget.device - fixed - kinds.pinned_nbytes
        held = cached + needs.feature_nbytes(chunk, "host")
        if room < 0 or (budget.host is not None and held > budget.host):
            continue
        stays = kinds.products_nbytes <= min(room, most) and not options.cpu_experts
        for slots, slot in ((0, 0),) if stays else ((0, 0), *choices):
            left = room - slots * slot_stride(slot)
            if left < 0 or (hops and held + _staging(needs, chunk, slots, slot) > (budget.host or 0)):
                continue
            if slots and options.slots and needs.batching.micro_batches.takes_turns:
                left = room_beside_slots(halving_order(kinds.products), left, slots, slot)
            fit = ChunkRoom(chunk, left if all_stay else min(left, most), slots, slot, host_most=host_most)
            if left < 0 or (options.weight_shares is not None and not (
                    left >= most and _host_room(needs, budget, fit) == host_most)):
                continue
            by_name = options.expert_slots or options.experts_ahead or options.cpu_experts
            if not stays and not by_name and _reads_in_place(needs, kinds, budget, fit):
                yield replace(fit, in_place=True)
            if stays or (slots and not by_name):
                yield fit
            if slots and kinds.pools.tables:
                yield from with_pools(fit, kinds, options, _host_room(needs, budget, fit), needs.rates.multiplies)


def _reads_in_place(needs: ModelNeeds, kinds: WeightKinds, budget: Limits, fit: ChunkRoom) -> bool:
    """Return whether the device may read weights in host memory, with slots where others come from disk."""
    if needs.rates.in_place_s is None or not (room := _host_room(needs, budget, fit)):
        return False
    kept = sum(aligned(u.nbytes) for u in spread_resident(kinds.products, fit.room))
    return (kinds.products_nbytes - kept <= room) is (fit.slots == 0)


def _asked_shares(needs: ModelNeeds, kinds: WeightKinds, options: Options) -> tuple[int, int]:
    """Bytes of weights that may lie on the device, and in host memory beside the disk."""
    device, host = options.weight_shares or (2.0**20, 2.0**20)
    return int(device * kinds.products_nbytes), int(host * kinds.products_nbytes) * (needs.weight_tier == "disk")


def _cheapest(
    needs: ModelNeeds, kinds: WeightKinds, budget: Limits, workload: Workload, fits: Sequence[ChunkRoom],
    ratio: float = 1.0,
) -> ChunkRoom | None:
    """The fit of least predicted time, of equals the first; of chunks that take at most `ratio` times that, the
    shortest from `REUSED_CHUNK` tokens on. Bounds come first, as if weights filled the room."""
    new_tokens = workload.effective_lengths(needs.batching)[1]

    @functools.cache
    def prefill_steps(chunk: int) -> dict[int, int]:
        return _prefill_steps(needs, workload, chunk_sizes(chunk, needs.speculative))

    @functools.cache
    def kept(room: int, pools: bool) -> int:
        return sum(aligned(u.nbytes) for u in spread_resident(kinds.streaming(pools), room))

    def cost(fit: ChunkRoom, nbytes: int) -> float:
        steps = dict(prefill_steps(fit.chunk))
        room, tables = _host_room(needs, budget, fit), 0
        if fit.by_name:
            tables, room = _host_tables(kinds, fit, room)
        held = min(nbytes if fit.in_place else max(0, nbytes - kinds.tied_nbytes), room)
        streams = StepStreams(needs.rates, kinds, needs.batching.micro_batches.fetches, nbytes, held, fit, tables)
        steps[1] = steps.get(1, 0) + max(0, new_tokens - 1)
        return sum(count * streams.step_time_s(tokens) for tokens, count in steps.items())

    def exact(fit: ChunkRoom, bound: float) -> float:
        pools = fit.by_name
        return bound if fit.all_stay else cost(fit, whole[pools] - kept(fit.room, pools))

    whole = {pools: sum(aligned(u.nbytes) for u in kinds.streaming(pools)) for pools in (False, True)}
    bounds = [(cost(fit, 0 if fit.all_stay else max(0, whole[fit.by_name] - fit.room)), i)
              for i, fit in enumerate(fits)]
    best, least = None, math.inf
    for bound, i in sorted(bounds):
        if bound >= least:
            break
        if (found := exact(fits[i], bound)) < least:
            best, least = fits[i], found
    near = [(fits[i].chunk, found, i) for bound, i in bounds if ratio > 1 and best is not None and (
        REUSED_CHUNK <= fits[i].chunk < best.chunk) and bound <= ratio * least and (
            found := exact(fits[i], bound)) <= ratio * least]
    return fits[min(near)[2]] if near else best


def _upper(needs: ModelNeeds, chunk: int) -> tuple[int, bool]:
    """Bytes that cache, from below, and activations, from above, take together, and whether a prefill's activations
    may lie where decoding has cache, as its own ends with the prompt (FlashDecoding++Next, section V)."""
    need = needs.need(chunk).activations
    decode = max(needs.need(1).activations, needs.speculative_activations)
    whole, prompt = _aligned(needs.cache), _aligned(needs.cache_prompt)
    grows = needs.cache_prompt and (whole - prompt) * GROWTH_PARTS >= whole
    if grows and chunk > 1 and need > decode:  # a chunk of one token is a decode step, which has the whole cache
        return max(prompt + aligned(need), whole + aligned(decode)), True
    return whole + aligned(max(need, decode)), False


def _aligned(sizes: Mapping[str, int]) -> int:
    """Bytes that buffers of such sizes take together."""
    return sum(aligned(n) for n in sizes.values())


def _resident(kinds: WeightKinds, fit: ChunkRoom) -> set[str]:
    """Names of the weights that stay on the device."""
    chosen = {u.name for u in kinds.pinned}
    if not fit.all_stay:
        pools = kinds.pools_of(fit)
        chosen |= {u.name for u in kinds.pools.tables} - {u.name for u in (*pools.tables, *pools.on_host)}
        return chosen | {u.name for u in spread_resident(kinds.streaming(fit.by_name), fit.room)}
    chosen |= {u.name for u in kinds.products}
    room = fit.room - kinds.products_nbytes
    for u in kinds.tables:  # these come last: on disk they cost little
        if aligned(u.nbytes) <= room:
            chosen.add(u.name)
            room -= aligned(u.nbytes)
    return chosen


def _staging(needs: ModelNeeds, chunk: int, slots: int, slot_nbytes: int) -> int:
    """Host bytes that copies from disk pass through on their way to a GPU: slots, and the rows of a lookup."""
    return slots * slot_stride(slot_nbytes) + host_rows_nbytes(needs, chunk) + 2 * PAGE_NBYTES


def host_rows_nbytes(needs: ModelNeeds, chunk: int) -> int:
    """Host bytes for the rows of a lookup, which are activations of a step."""
    return max(needs.need(tokens).activations for tokens in (chunk, 1, *needs.speculative[:1]))


def _host_room(needs: ModelNeeds, budget: Limits, fit: ChunkRoom) -> int:
    """Bytes of host memory for weights beside what copies from disk pass through."""
    if not budget.host or needs.weight_tier != "disk":
        return 0
    hop_nbytes = _staging(needs, fit.chunk, fit.slots, fit.slot_nbytes) if needs.host_hop else 0
    room = budget.host - needs.host_nbytes - needs.feature_nbytes(fit.chunk, "host") - hop_nbytes
    return min(max(0, room), fit.host_most)


def _host_tables(kinds: WeightKinds, fit: ChunkRoom, room: int) -> tuple[int, int]:
    """Divide host memory between tables that have pools and other weights: what is left where no experts land on their
    way from disk."""
    pools = kinds.pools_of(fit)
    room -= pools.on_host_nbytes
    if not fit.pool_slots or not pools.hop:
        return 0, room
    held = pools.held_nbytes(room, fit.pool_slots)
    landing = 0 if held == pools.tables_nbytes else pools.landing_nbytes(fit.pool_slots)
    return held, max(0, room - held - landing)


def _planned(
    needs: ModelNeeds, kinds: WeightKinds, budget: Budget, workload: Workload, options: Options, machine: str,
    fit: ChunkRoom,
) -> Plan:
    """The plan that spends the budget as `fit` says."""
    resident, pools = _resident(kinds, fit), kinds.pools_of(fit)
    weights = [place_weight(u, u.name in resident, fit, needs.weight_tier, u in pools.on_host) for u in needs.uses]
    tables, rest = _host_tables(kinds, fit, _host_room(needs, budget, fit))
    whole = {u.name for u in kinds.products} if fit.in_place else ()
    weights = fill_host(fill_host(weights, tables, True), rest, whole=whole)
    weights = [*map(read_in_place, weights)] if fit.in_place else weights
    rows = {u.name: u.rows for u in needs.uses if u.product}
    piece = max((w.nbytes // rows[w.name] * (w.tile_rows or rows[w.name])
                 for w in weights if w.streams and w.name in rows), default=0)
    chunks = chunk_sizes(fit.chunk, needs.speculative)
    lead = min(options.lead or fit.slots, fit.slots)
    schedule = Schedule(fit.slots, piece, lead, chunks, needs.host_hop, needs.batching,
                        pools.routed(fit.pool_slots))
    plan = Plan(needs.fingerprint, machine, budget.limits, workload, schedule, tuple(weights),
                cache_format=needs.cache_format, score_ranges=options.score_ranges)
    upper, overlays = _upper(needs, fit.chunk)
    caches = {"prefill": needs.cache_prompt, "decode": needs.cache} if overlays else {"all": needs.cache}
    plan = lay_out(plan, needs.constants, caches, upper, host_rows_nbytes(needs, fit.chunk),
                   (*expert_buffers(plan, needs), *(needs.staged.buffers() if needs.staged is not None else ()),
                    *needs.feature_buffers(fit.chunk)))
    return replace(plan, prediction=_predicted(needs, kinds, plan, fit))


def _predicted(needs: ModelNeeds, kinds: WeightKinds, plan: Plan, fit: ChunkRoom) -> Prediction:
    """Predict a plan by the closed form; the simulator's word, once there are Programs, takes its place."""
    s, streamed = plan.schedule, [w for w, u in zip(plan.weights, needs.uses, strict=True)
                                  if w.tier != "device" and not w.routed and u.product]
    streams = StepStreams(needs.rates, kinds, needs.batching.micro_batches.fetches, sum(w.nbytes for w in streamed),
                       sum(w.nbytes for w in streamed if w.tier == "host"), fit,
                       sum(aligned(w.nbytes) for w in plan.weights if w.pool_slots and w.tier == "host"))
    rates = needs.rates
    chunks = _prefill_steps(needs, plan.workload, s.prefill_chunks)
    step_s = {tokens: streams.step_time_s(tokens) + rates.device_attend_s(tokens) for tokens in (1, *chunks)}
    busy = rates.busy_s(1, *streams.moved(1), streams.in_place)
    for stream, seconds in streams.named_s(1).items():
        busy[stream] = busy.get(stream, 0.0) + seconds
    if needs.weight_tier == "host":
        busy[UPLOAD] = busy.pop(DISK)
    beside = {"device": needs.workspace(s.prefill_chunk),
              "host": needs.host_nbytes - (needs.staged.host_nbytes if needs.staged is not None else 0)
              + streams.pools.workspace * (fit.on_host > 0)}
    peak = {tier: size + beside.get(tier, 0) for tier, size in plan.arenas.items()}
    prefill_s = sum(count * step_s[tokens] for tokens, count in chunks.items())
    return Prediction(prefill_s, step_s[1], {stream: t for stream, t in busy.items() if t},
                      streams.moved(1)[0] + round(streams.named_nbytes(1)), peak,
                      max(busy, key=lambda stream: busy[stream]))


def _prefill_steps(needs: ModelNeeds, workload: Workload, sizes: Sequence[int]) -> dict[int, int]:
    """Return how many steps of which of these sizes the prompts of all sequences take."""
    times = needs.batching.admission.prefills(workload.batch)
    steps = chunk_steps(workload.effective_lengths(needs.batching)[0], sizes)
    return {tokens: times * count for tokens, count in steps.items()}


def _shortest(needs: ModelNeeds, prompt: int) -> int:
    """Tokens of the shortest prefill step. Where sequences enter alone it computes few of them, at the price of its
    launches, of which candidates count what issuing them takes, and not the memory that the small ones touch. A step
    that reads a share of the cache is no prefill's, nor one that checks drafts. PlanError where none is left."""
    if not (needs.batching.admitted or needs.batching.sparsity.blocks < 1):
        return 1
    sizes = {*range(2, prompt + 1)}.difference(needs.speculative)
    if prompt > 1 and not sizes:
        raise PlanError(f"steps over {needs.speculative} tokens leave none for a prompt of {prompt}; check fewer")
    return min(sizes, key=lambda n: (n < SHORTEST_CHUNK, abs(n - SHORTEST_CHUNK)), default=1)


def _smallest_tile(u: WeightUse) -> int:
    row = -(-u.nbytes // max(1, u.rows))
    return max(row, min(u.nbytes, PAGE_NBYTES)) if u.tileable else u.nbytes


def _slot_choices(kinds: WeightKinds, options: Options, needs: ModelNeeds) -> list[tuple[int, int]]:
    """List the (count, bytes) of staging slots to compare.

    Counts are at least `kinds.least_slots`; a wish of fewer has none. Where micro-batches take turns layer by layer,
    slots hold a layer's weights until the last of them has run through it.

    Raises:
        PlanError: `options` name a size that some piece does not fit.
    """
    products, least_slots = kinds.products, kinds.least_slots
    if not products:
        return []
    low = max(max(_smallest_tile(u) for u in products), max((u.nbytes for u in products if not u.tileable), default=0))
    if options.slot_nbytes is not None and options.slot_nbytes < low:
        raise PlanError(f"slot_nbytes: {options.slot_nbytes} is below {low}, the largest piece that must stream whole")
    largest, usual = max(u.nbytes for u in products), needs.slot_nbytes
    huge = [max(low, largest // HUGE_TILES)] if largest // HUGE_TILES > max(usual) * 2 else []
    small = [low << i for i in range(8) if low << i < min(usual)]
    sizes = [options.slot_nbytes] if options.slot_nbytes else list(dict.fromkeys(
        [*(max(low, min(largest, n)) for n in usual), *huge, *small, low]))
    if not needs.batching.micro_batches.takes_turns or options.slots:
        counts = [options.slots] if options.slots else sorted({least_slots, *SLOTS})
        return [(slots, slot) for slots in counts if slots >= least_slots for slot in sizes]
    least = {slot: max(least_slots, most_tiles(products, slot)) for slot in sizes}
    return [(least[slot] + ahead, slot) for slot in sizes
            for ahead in dict.fromkeys((0, 1, 2, least[slot] // 2, least[slot]))]
