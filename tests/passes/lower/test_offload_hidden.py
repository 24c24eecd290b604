"""Copies of hidden states follow from who touches what: on drafts written by hand."""

from __future__ import annotations

from dataclasses import replace

from forebay.passes.lower.offload_hidden import offload_hidden
from forebay.rewriter.ir.draft import Arrive, Draft, Evict, Fetch, Found, Free, Lookup, Store, Vacant
from forebay.rewriter.ir.hidden_layout import hidden_home_nbytes, offloaded_regions, region_buffers
from forebay.rewriter.ir.plan import BufferPlacement, Limits, Plan, Schedule, Workload
from forebay.rewriter.ir.program import COMPUTE, FileSlice, Launch, Release, Rows, Span
from forebay.rewriter.ir.schedule.admission import Admission
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.ir.schedule.hidden_placement import HiddenPlacement
from forebay.rewriter.ir.schedule.micro_batches import MicroBatches

NBYTES = {"state": 640, "table": 64}
AT = {"state": 0, "table": 640}
BLOCK = BatchSchedule(MicroBatches(3), hidden=HiddenPlacement("disk", 1))


def plan(batching: BatchSchedule) -> Plan:
    """Regions of 704 bytes, and where what leaves them waits."""
    regions = max(batching.hidden_regions()) + 1
    buffers = [BufferPlacement(f"{name}@{n}", "activation", "device", 704 * n + AT[name], nbytes, "prefill")
               for n in range(regions) for name, nbytes in NBYTES.items()]
    buffers += [BufferPlacement(f"hidden_{tier}", "io", {"disk": "cache"}.get(tier, tier), 8192, nbytes)
                for tier, nbytes in hidden_home_nbytes(buffers, batching).items()]
    return Plan("", "", Limits(1 << 20), Workload(3, 8, 1), Schedule(batching=batching), (), buffers=tuple(buffers))


def span(name: str, k: int, batching: BatchSchedule = BLOCK) -> Span:
    return Span("device", 704 * batching.hidden_regions()[k] + AT[name], NBYTES[name], f"{name}@{k}")


def launch(label: str, reads: tuple[Span, ...] = (), writes: tuple[Span, ...] = ()) -> Launch:
    return Launch(COMPUTE, "op", (), {}, (), reads, writes, label)


def turns(pieces: int) -> Draft:
    """State and table are written, each following piece reads both and writes the state, and then they end."""
    draft = Draft("step")
    for piece in range(pieces):
        for k in range(3):
            both = span("state", k), span("table", k)
            draft.items.append(launch(f"{piece}@{k}", both if piece else (), both[:1] if piece else both))
            if piece == pieces - 1:
                draft.items += [Release(COMPUTE, each) for each in both]
    return draft


def told(draft: Draft) -> list[str]:
    """The items in short: what is stored and loaded by name."""
    found = []
    for item in draft.items:
        if isinstance(item, Store | Evict):
            found.append(f"{type(item).__name__} {draft.stores[item.index].source.buffer}")
        elif isinstance(item, Fetch | Arrive | Free):
            found.append(f"{type(item).__name__} {draft.moves[item.index].span.buffer}")
        elif isinstance(item, Release):
            found.append(f"Release {item.span.buffer}")
        else:
            found.append(item.label if isinstance(item, Launch) else type(item).__name__)
    return found


def test_what_is_written_goes_and_what_is_read_comes() -> None:
    """One region for three: each turn begins with what it left there, and the table goes a single time."""
    draft = turns(3)
    offload_hidden(draft, plan(BLOCK))
    found = told(draft)
    assert found[:7] == ["0@0", "Store state@0", "Store table@0", "Evict state@0", "Evict table@0", "Vacant", "0@1"]
    at = found.index("1@0")
    assert found[at - 5 : at + 5] == ["Vacant", "Fetch state@0", "Fetch table@0", "Arrive state@0", "Arrive table@0",
                                     "1@0", "Store state@0", "Evict state@0", "Free table@0", "Vacant"]
    assert found[-9:] == ["Vacant", "Fetch state@2", "Fetch table@2", "Arrive state@2", "Arrive table@2", "2@2",
                          "Release state@2", "Release table@2", "Vacant"]
    assert [out.source.buffer for out in draft.stores].count("table@1") == 1
    homes = {move.span.buffer: move.source for move in draft.moves}
    assert len({home.offset for home in homes.values()}) == 6 and all(  # type: ignore[union-attr]
        home.offset % 4096 == 0 and home.offset >= 8192 for home in homes.values())  # type: ignore[union-attr]
    assert draft.files == {"cache": 8192 + 3 * 2 * 4096}


def test_regions_of_their_own_are_left_alone() -> None:
    """Hidden states that stay on the device, and a region that nobody shares."""
    for batching in (BatchSchedule(MicroBatches(3)), BatchSchedule(MicroBatches(3), hidden=HiddenPlacement("disk", 3)),
                     BatchSchedule(MicroBatches(3), hidden=HiddenPlacement("disk", 2, 1))):
        draft = turns(3)
        before = list(draft.items)
        offload_hidden(draft, plan(batching))
        assert draft.items == before and not draft.moves and not draft.stores and not draft.files
        assert not offloaded_regions(batching) and not hidden_home_nbytes(plan(batching).buffers, batching)
    two = BatchSchedule(MicroBatches(3), hidden=HiddenPlacement("host", 2))
    assert offloaded_regions(two) == {0: (0, "host"), 2: (0, "host")}
    assert region_buffers(plan(two).buffers, two).keys() == NBYTES.keys()


def test_with_three_regions_a_region_is_vacant_a_turn_later() -> None:
    batching = BatchSchedule(MicroBatches(6), hidden=HiddenPlacement("disk", 3))
    draft = Draft("step")
    for _ in range(2):
        draft.items += [launch(f"@{k}", (), (span("state", k, batching),)) for k in range(6)]
    offload_hidden(draft, plan(batching))
    found = told(draft)
    assert found[:7] == ["@0", "Store state@0", "@1", "Store state@1", "Evict state@0", "Vacant", "@2"]
    assert sum(isinstance(item, Vacant) for item in draft.items) == 12


def test_a_lookup_is_waited_for_where_its_turn_ends() -> None:
    draft = Draft("step")
    rows = Rows(FileSlice("weights", 0, 6400), 640)
    for k in range(3):
        draft.items += [Lookup(k, f"look up @{k}", -1, rows, span("state", k))]
    for k in range(3):
        draft.items += [Found(k), launch(f"@{k}", (span("state", k),))]
    offload_hidden(draft, plan(BLOCK))
    found = told(draft)
    assert found[:5] == ["Lookup", "Found", "Store state@0", "Evict state@0", "Vacant"]
    assert found.count("Found") == 3 and found.index("@0") > found.index("Arrive state@0")


def test_what_ends_where_it_waits_is_not_released_on_the_device() -> None:
    draft = turns(2)
    draft.items = [item for item in draft.items if not isinstance(item, Release)]
    draft.items.append(Release(COMPUTE, span("state", 0)))
    offload_hidden(draft, plan(BLOCK))
    assert "Release state@0" not in told(draft)


def test_shares_are_spread_and_contradictions_are_named() -> None:
    spread = BatchSchedule(MicroBatches(6), hidden=HiddenPlacement("disk", 2, 2, 2))
    assert sorted(spread.hidden_homes()) == ["device"] * 2 + ["disk"] * 2 + ["host"] * 2 and not spread.fault(6)
    assert spread.hidden_homes()[:3] != ["device"] * 3
    hidden = spread.hidden
    assert replace(spread, hidden=replace(hidden, on_host=5)).fault(6).startswith("hidden.on_device, hidden.on_host")
    assert replace(spread, hidden=replace(hidden, slots=0)).fault(6).startswith("hidden.slots")
    assert replace(spread, micro_batches=MicroBatches(6, "row")).fault(6).startswith("hidden.tier: ")
    assert replace(spread, admission=Admission(2)).fault(6)
    assert BatchSchedule(MicroBatches(6), hidden=HiddenPlacement(on_device=1)).fault(6)
    plain = BatchSchedule(MicroBatches(3))
    assert plain.of_step(8) == plain
    assert spread.of_step(1) == BatchSchedule(MicroBatches(6)) and spread.of_step(8) == spread
