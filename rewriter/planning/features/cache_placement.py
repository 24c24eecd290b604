"""Placement of a batch's caches: tier, tokens of a block, and shares on faster tiers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from forebay.rewriter.ir.alignment import PAGE_NBYTES
from forebay.rewriter.ir.byte_sizes import format_nbytes
from forebay.rewriter.ir.cache_layout import TAIL, block_rows_nbytes
from forebay.rewriter.ir.plan import ARENAS, Plan, PlanError
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.ir.schedule.cache_placement import CachePlacement
from forebay.rewriter.ir.state import KEY_MEANS_TENSOR, state_name
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.planning.features.feature import ScheduleFeature, ScheduleRequest
from forebay.rewriter.planning.options import Options

BLOCK_TOKENS = (8, 16, 32, 64)  # of a cache block
MAX_PADDING = 1 / 8  # of a token's bytes


def cache_placements(batching: BatchSchedule, request: ScheduleRequest) -> Iterator[BatchSchedule]:
    """Return the placements of caches off the device, all on the furthest allowed tier; none where they have to
    stay."""
    options = request.options
    if not request.staged:
        yield batching
    elif options.cache_tier != "device" and (options.cache_tier or (
            request.graphs.pageable and (request.graphs.rewindable or not options.admitted))):
        tokens = options.cache_tokens or block_tokens(block_rows_nbytes(request.graphs.step(1)))
        yield replace(batching, cache=CachePlacement(options.cache_tier or "disk", tokens, options.cache_slots,
                                                     cpu_attention=bool(options.cpu_attention)))


def block_tokens(rows: Iterable[int]) -> int:
    """Tokens of a cache block, for layers that keep these bytes of a token: the fewest of `BLOCK_TOKENS` that are whole
    pages without much padding. Loads join a sequence's blocks, and what is not full yet takes memory: fewer are better.
    """
    for count in BLOCK_TOKENS:
        unit = PAGE_NBYTES // count
        if all(-(-each // unit) * unit <= (1 + MAX_PADDING) * each for each in rows):
            return count
    return BLOCK_TOKENS[-1]


def in_shares(
    batching: BatchSchedule, layers: int, options: Options, machine: Machine, host: bool,
    fits: Callable[[BatchSchedule], bool], parts: tuple[int, int], rewindable: bool = True
) -> list[BatchSchedule]:
    """List a schedule with shares of the caches of so many layers on faster tiers.

    Args:
        batching: The schedule, with all of its caches on one tier.
        layers: Layers whose caches are staged.
        options: The shares that are asked for; without any, from none to all that fit are listed.
        machine: The machine, whose host may attend beside the device.
        host: Whether host memory is allowed.
        fits: Whether a schedule has a plan.
        parts: Into how many parts the most that fit the device, and host memory, are divided.
        rewindable: Whether all states are K and V; the host attends over those alone.

    Returns:
        Those that fit.
    """
    total = layers * batching.micro_batches.count

    def most(way: Callable[[int], BatchSchedule]) -> int:
        """The most caches that a faster tier has room for; all of them need no slots for what comes from the disk."""
        if fits(way(total)):
            return total
        return max(0, bisect_right(range(total), 0, key=lambda n: int(not fits(way(n)))) - 1)

    if options.cache_tier is not None or options.cache_shares is not None:
        ways = [asked_shares(batching, layers, options)]
    else:
        held = most(lambda n: _in_whole_layers(batching, 0, n)) if batching.cache.tier == "disk" and host else 0
        stay = most(lambda n: _in_whole_layers(batching, n, min(held, total - n)))
        ways = [_in_whole_layers(batching, d, min(h, total - d))
                for d in parts_of(stay, parts[0]) for h in parts_of(held, parts[1])]
    if options.cpu_attention is None and rewindable and host_attends(machine):
        ways += [replace(way, cache=replace(way.cache, cpu_attention=True)) for way in ways
                 if way.cache.on_host or way.cache.tier == "host"]
    if not options.cpu_attention and rewindable and machine.host_hop and machine.host_read_bytes_per_s:
        ways += [replace(way, cache=cache) for way in ways if not way.recomputation.checkpoints and not (
            cache := way.cache.read_in_place()).fault()]
    return [*filter(fits, dict.fromkeys(ways))]


def asked_shares(batching: BatchSchedule, layers: int, options: Options) -> BatchSchedule:
    """The schedule with the shares of its caches that `options` name on faster tiers, none where they name none.
    PlanError for shares that are none."""
    device_share, host_share = options.cache_shares or (0.0, 0.0)
    if min(device_share, host_share) < 0 or device_share + host_share > 1:
        raise PlanError(f"cache_shares: {device_share} on the device and {host_share} in host memory must be "
                        "shares of one whole")
    total = layers * batching.micro_batches.count
    return _in_whole_layers(batching, int(device_share * total), int(host_share * total))


def _in_whole_layers(batching: BatchSchedule, device: int, host: int) -> BatchSchedule:
    """The schedule with at most so many of its caches on the device and in host memory, if not all others are there: as
    many as lie together."""
    unit, host = batching.placement_granularity, 0 if batching.cache.tier == "host" else host
    return replace(batching,
                   cache=replace(batching.cache, on_device=device // unit * unit, on_host=host // unit * unit))


def host_attends(machine: Machine) -> bool:
    """Return whether there is a host beside the device that is known to attend; without a GPU both are the same
    cores."""
    return machine.host_hop and machine.host_attention_bytes_per_s > 0


def parts_of(most: int, parts: int) -> list[int]:
    """0, `most` and what lies between, in so many equal parts."""
    return list(dict.fromkeys(most * i // parts for i in range(parts + 1)))


def explain_cache(plan: Plan) -> tuple[str, str]:
    """The format of the caches, and where they lie."""
    return "cache", f"{plan.cache_format}, {_where(plan)}"


def _where(plan: Plan) -> str:
    batching = plan.schedule.batching
    if not batching.cache.staged:
        return "on the device"
    homes: dict[str, int] = {}
    for b in plan.buffers:
        if b.kind == "cache" and not b.name.startswith((TAIL, state_name(KEY_MEANS_TENSOR))):
            home = "on disk" if b.arena not in ARENAS else f"in {b.arena} memory"
            homes[home] = homes.get(home, 0) + b.nbytes
    where = " and ".join(f"{format_nbytes(nbytes)} {home}" for home, nbytes in homes.items())
    attends = ("; decode steps attend in host memory to what lies there" if batching.cache.cpu_attention else
               "; the device reads what lies in host memory there" if batching.cache.in_place else "")
    kept = ""
    made, cache = batching.recomputation, batching.cache
    if made.checkpoints:
        share = "all tokens" if made.checkpoints == made.period else (
            f"{made.checkpoints} of {made.period} stretches of {batching.stretch} tokens")
        form = "" if made.format == "native" else f" in {made.format}"
        kept = (f"; of {share} checkpoints{form}, {made.block_tokens} tokens in the room of {cache.block_tokens}, of "
                "which K and V are made again")
    return (f"{where} in blocks of {cache.block_tokens} tokens, through {cache.slots} staging slots; the blocks that "
            f"are not full yet on the device{attends}{kept}")


CACHE_PLACEMENT = ScheduleFeature("cache", candidates=cache_placements, explain=explain_cache)
