"""Staged caches (off the device, or of admitted sequences alone): memory on each tier, and bytes that a step moves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import fx

from forebay.rewriter.ir.alignment import ALIGNMENT, PAGE_NBYTES, aligned, whole_pages
from forebay.rewriter.ir.cache_layout import (
    BATCH_SLOTS,
    CACHE_HOME_ARENAS,
    CACHE_STAGING,
    CACHE_STORE_STAGING,
    ENTERING,
    OPERANDS,
    STORE_STAGING_COUNT,
    TAIL,
    WORD,
    StagedLayer,
    cache_home_name,
    input_sizes,
    moved_shares,
    state_values,
)
from forebay.rewriter.ir.plan import PlanError, Workload
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.predict.closed_form import STILL, CacheMoves


@dataclass(frozen=True)
class StagedCache:
    """Bytes, by buffer name, of the staging slots, of the inputs that tell which blocks and slots, of the tails that
    stay on the device, and by tier of each layer's caches that live there, in whole pages. `tiers` are those of the
    micro-batches, by layer. Where copies hop, `host_slots` are the slots that the host lends to what the disk holds."""

    batching: BatchSchedule
    slots: Mapping[str, int]
    inputs: Mapping[str, int]
    tails: Mapping[str, int] = field(default_factory=dict)
    homes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    tiers: Mapping[int, list[str]] = field(default_factory=dict)
    layers: Mapping[int, StagedLayer] = field(default_factory=dict)
    host_slots: Mapping[str, int] = field(default_factory=dict)

    @property
    def device_nbytes(self) -> int:
        """Bytes of the device arena beside the tails."""
        return (sum(map(whole_pages, self.slots.values())) + sum(self.homes.get("device", {}).values())
                + sum(map(aligned, self.inputs.values())))

    @property
    def host_nbytes(self) -> int:
        """Bytes of the host arena."""
        return (sum(map(whole_pages, self.host_slots.values())) + sum(self.homes.get("host", {}).values())
                + sum(map(aligned, self.operands.values())))

    @property
    def operands(self) -> dict[str, int]:
        """Bytes of host memory for what the host's launches read and write beside the caches, by micro-batch."""
        if not self.batching.cache.cpu_attention or "host" not in self.homes:
            return {}
        room = max(layer.operands.room_nbytes for layer in self.layers.values())
        return {f"{OPERANDS}{k}": room for k in range(self.batching.micro_batches.count)}

    def buffers(self) -> Iterator[tuple[str, str, str, int, int]]:
        """All but the tails, as (name, kind, arena, nbytes, alignment); those at pages first, so that they leave no gap
        behind slots for weights."""
        for arena, slots in (("device", self.slots), ("host", self.host_slots)):
            for name, nbytes in slots.items():
                yield name, "slot", arena, nbytes, PAGE_NBYTES
        for tier, sizes in self.homes.items():
            for name, nbytes in sizes.items():
                yield name, "cache", CACHE_HOME_ARENAS[tier], nbytes, PAGE_NBYTES
        for arena, sizes in (("device", self.inputs), ("host", self.operands)):
            for name, nbytes in sizes.items():
                yield name, "io", arena, nbytes, ALIGNMENT

    def moves(self, work: Workload, tokens: int) -> CacheMoves:
        """Return the bytes that a step over `tokens` tokens typically moves."""
        batching, nbytes, copies = self.batching, dict[tuple[str, str], float](), 0
        on_host, read, whole = 0.0, 0.0, sum(len(self.tiers[i]) * layer.nbytes for i, layer in self.layers.items())
        some = batching.sequences(work.batch,
                                  tokens) / work.batch if batching.admitted and batching.is_prefill(tokens) else 1.0
        for i, tiers in self.tiers.items():
            layer = self.layers[i]
            attended = tiers.count("host") if batching.attends_on_host(tokens) else 0
            for link, moved in ((("device", "host"), layer.operands.given_nbytes),
                                (("host", "device"), layer.operands.made_nbytes)):
                nbytes[link] = nbytes.get(link, 0.0) + attended * tokens * moved
            copies += attended * layer.operands.copies
            on_host += attended * layer.nbytes
            there = tiers.count("host") if batching.cache.in_place else 0
            read += there * layer.nbytes * moved_shares(layer, batching, work, tokens)[0]
            for tier in ("disk",) if attended or there else ("host", "disk"):
                for link, share in zip(((tier, "device"), ("device", tier)), moved_shares(
                        layer, batching, work, tokens), strict=True):
                    nbytes[link] = nbytes.get(link, 0.0) + some * tiers.count(tier) * share * layer.nbytes
                copies += 2 * (tiers.count(tier) if some == 1.0 else bool(tiers.count(tier)))
        return CacheMoves({link: n for link, n in nbytes.items() if n}, copies, batching.cache.slots, on_host,
                          on_host / whole, read) if copies or read else STILL


def staged_cache(layers: Mapping[int, StagedLayer], batching: BatchSchedule, host_hop: bool = False) -> StagedCache:
    """Return the memory of the caches of all micro-batches of `block`, from the `layers` of one; with `host_hop` what
    comes from the disk passes through host memory. PlanError where more of them are to lie on faster tiers than there
    are, or sequences enter and a layer's lie apart."""
    count, cache, admitted = batching.micro_batches.count, batching.cache, batching.admitted
    faster, unit = cache.on_device + cache.on_host, batching.placement_granularity
    if faster > len(layers) * count:
        raise PlanError(f"plan.schedule.batching.cache.on_device, on_host: {faster} cannot lie on faster tiers; "
                        f"{len(layers)} layers of {count} micro-batches have {len(layers) * count}")
    if cache.on_device and batching.recomputation.checkpoints:
        raise PlanError("plan.schedule.batching.cache.on_device: caches on the device have no checkpoints "
                        "(plan.schedule.batching.recomputation.checkpoints); let all lie on slower tiers")
    if cache.on_device % unit or cache.on_host % unit:
        raise PlanError(f"plan.schedule.batching.cache.on_device, on_host: {cache.on_device} and {cache.on_host} "
                        f"are not whole layers of {count} micro-batches; where sequences enter slots "
                        "(plan.schedule.batching.admission.sequences) all caches of a layer lie on one tier")
    tiers = dict(zip(layers, batching.cache_homes(len(layers)), strict=True))
    homes: dict[str, dict[str, int]] = {}
    tails = {}
    for i, of_layer in tiers.items():
        for tier in dict.fromkeys(of_layer):
            homes.setdefault(tier, {})[cache_home_name(i, tier)] = of_layer.count(tier) * layers[i].home_nbytes
        if staged := layers[i].tails and sum(map(cache.has_tails, of_layer)):
            tails[f"{TAIL}{i}"] = staged * layers[i].tail_nbytes
    largest = max(layer.nbytes // layer.sequences * max(layer.sequences, admitted) for layer in layers.values())
    slots = {f"{CACHE_STAGING}{i}": largest for i in range(cache.slots)}
    inputs = {name: count * size * WORD for name, size in input_sizes(layers, batching).items()}
    if admitted:
        slots[ENTERING] = admitted * max(
            layers[i].entering_nbytes(of_layer[0], cache.in_place) for i, of_layer in tiers.items())
        inputs[BATCH_SLOTS] = admitted * WORD
    lent = {}
    if host_hop and "disk" in homes:
        names = [*(f"host_{CACHE_STAGING}{i}" for i in range(cache.slots)),
                 *(f"host_{CACHE_STORE_STAGING}{i}" for i in range(STORE_STAGING_COUNT))]
        lent = dict.fromkeys(names, largest)
    return StagedCache(batching, slots, inputs, tails, homes, tiers, layers, lent)


def staged_places(step: fx.GraphModule, batching: BatchSchedule, prompt: int) -> StagedCache | None:
    """Return the memory of cache rows on the device that a prefill of some sequences stages, from the decode step graph
    of one micro-batch; prompts are of at most `prompt` tokens. None where all enter at once."""
    admitted = batching.admitted
    if batching.cache.staged or not admitted:
        return None
    counts = any(node.name == "count" for node in step.graph.find_nodes(op="placeholder"))
    # of states that are not rewindable whole ones: a last chunk may then end behind its prompt
    layers = (sum(aligned(admitted * (value[0].nbytes if counts else prompt * value.nbytes // (
        value.shape[0] * value.shape[2]))) for value in values.values()) for values in state_values(step).values())
    return StagedCache(batching, {ENTERING: max(layers)}, {BATCH_SLOTS: admitted * WORD})
