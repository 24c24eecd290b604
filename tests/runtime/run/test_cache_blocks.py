"""A cache on disk always holds the last tokens written, wherever steps begin."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import with_settings

from forebay.kernels.attention.attention.reference import first_seen
from forebay.rewriter.ir.cache_layout import loads_name
from forebay.rewriter.ir.plan import BufferPlacement, Limits, Plan, Schedule, Workload
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.ir.schedule.cache_placement import CachePlacement
from forebay.rewriter.ir.schedule.micro_batches import MicroBatches
from forebay.runtime.run.cache_blocks import CacheBlocks

CONTEXT = 23


def plan_of(batch: int, micro_batches: int, tokens: int, *windows: int) -> Plan:
    batching = BatchSchedule(MicroBatches(micro_batches, "zigzag"), CachePlacement("disk", tokens, 3))
    return Plan("", "", Limits(1), Workload(batch, 11, CONTEXT - 11), Schedule(batching=batching), (),
                buffers=tuple(BufferPlacement(loads_name(w), "io", "device", 0, 0) for w in (0, *windows)))


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2, 4, 7, 32]),
       st.lists(st.tuples(st.lists(st.integers(0, CONTEXT), min_size=9, max_size=9), st.integers(1, 6)), max_size=12),
       st.sampled_from([0, 1, 2, 5, 8, 40, -1, -3, -8]))
def test_whatever_is_below_start_is_what_was_written_last(
    micro_batches: int, each: int, tokens: int, steps: list[tuple[list[int], int]], window: int
) -> None:
    """File, tail and slot are played with numbers: each token is written with the number of its step."""
    batch = micro_batches * each
    known = CacheBlocks(plan_of(batch, micro_batches, tokens, *filter(None, [window])))
    blocks, lost = known.blocks, -5
    file = torch.full((micro_batches, each * blocks, tokens), lost)
    tail = torch.full((micro_batches, each, tokens), lost)
    written = [[lost] * (CONTEXT + tokens) for _ in range(batch)]
    ends = [0] * batch
    for step, (wanted, span) in enumerate(steps):
        start = torch.tensor([min(w, end, CONTEXT - span) for w, end in zip(wanted, ends, strict=False)])
        given_ = known.step(start, span)
        for k in range(micro_batches):
            slot = torch.full((each * blocks, tokens), -9)
            parts = {name: value.reshape(micro_batches, -1)[k] for name, value in given_.items()}
            for i, row in enumerate(parts[loads_name(window)].tolist()):
                if row >= 0:
                    slot[i] = file[k, row]
            slot[parts["cache_before"]] = tail[k]
            by_token = slot.view(each, blocks * tokens)
            for s in range(each):
                n = k * each + s
                first = int(start[n])
                by_token[s, first : first + span] = step
                written[n][first : first + span] = [step] * span
                seen = max(0, int(first_seen(torch.tensor(first), window)))
                assert by_token[s, seen : first + span].tolist() == written[n][seen : first + span]
                loaded = sum(row >= 0 for row in parts[loads_name(window)].tolist()[s * blocks : (s + 1) * blocks])
                assert loaded <= -(-(first - seen) // tokens) + 1
                ends[n] = first + span
            tail[k] = slot[parts["cache_behind"]]
            for i, row in enumerate(parts["cache_stores"].tolist()):
                if row >= 0:
                    file[k, row] = slot[i]


@settings(deadline=None)
@given(st.integers(2, 4), st.sampled_from([1, 2, 4, 7]), st.data())
def test_some_sequences_alone_leave_the_others_as_they_were(batch: int, tokens: int, data: st.DataObject) -> None:
    """Steps over some slots, one of them named twice, between steps over all: file and tails are played with."""
    known = CacheBlocks(plan_of(batch, 1, tokens))
    blocks, lost = known.blocks, -5
    file, tail = torch.full((batch * blocks, tokens), lost), torch.full((batch, tokens), lost)
    written = [[lost] * (CONTEXT + tokens) for _ in range(batch)]
    for step in range(8):
        some = sorted(data.draw(st.sets(st.integers(0, batch - 1), min_size=1)))
        batch_slots = None if data.draw(st.booleans()) else torch.tensor([*some, some[0]])
        rows, span = list(range(batch)) if batch_slots is None else batch_slots.tolist(), data.draw(st.integers(1, 6))
        ends = [next((n for n, token in enumerate(written[row]) if token == lost), CONTEXT) for row in rows]
        starts = [min(data.draw(st.integers(0, CONTEXT)), end, CONTEXT - span) for end in ends]
        if batch_slots is not None:
            starts[-1] = starts[0]
        given_ = known.step(torch.tensor(starts), span, batch_slots)
        slot = torch.full((len(rows) * blocks, tokens), -9)
        for i, row in enumerate(given_["cache_loads"].tolist()):
            if row >= 0:
                slot[i] = file[row]
        slot[given_["cache_before"]] = tail[rows]
        by_token = slot.view(len(rows), blocks * tokens)
        for i, (row, first) in enumerate(zip(rows, starts, strict=True)):
            by_token[i, first : first + span] = step
            written[row][first:] = [step] * span + [lost] * (len(written[row]) - first - span)
            assert by_token[i, : first + span].tolist() == written[row][: first + span]
        tail[rows] = slot[given_["cache_behind"]]
        stores = [row for row in given_["cache_stores"].tolist() if row >= 0]
        assert len(set(stores)) == len(stores), "two copies would write the same bytes"
        for i, row in enumerate(given_["cache_stores"].tolist()):
            if row >= 0:
                file[row] = slot[i]


@settings(deadline=None)
@given(st.integers(1, 2), st.integers(1, 3), st.sampled_from([(4, 4), (2, 8), (4, 2), (1, 2), (8, 1)]),
       st.sampled_from([(1, 1), (1, 2), (2, 3), (1, 3)]),
       st.lists(st.tuples(st.lists(st.integers(0, CONTEXT), min_size=6, max_size=6), st.integers(1, 6)), max_size=12),
       st.booleans())
def test_keys_are_there_or_made_again(
    micro_batches: int, each: int, tokens: tuple[int, int], share: tuple[int, int],
    steps: list[tuple[list[int], int]], alone: bool,
) -> None:
    """With checkpoints: a token's checkpoint is its number plus 1000, and of it its K and V are made again. With
    `alone` each sequence is computed by itself, in a place."""
    if alone:
        micro_batches = 1
    batch = micro_batches * each
    plan = plan_of(batch, micro_batches, tokens[0])
    plan = with_settings(plan, recomputation={"checkpoints": share[0], "period": share[1], "block_tokens": tokens[1]})
    known, batching = CacheBlocks(plan), plan.schedule.batching
    blocks, kept, lost = known.blocks, batching.checkpoint_blocks(CONTEXT), -5
    widest = max(tokens)
    homes = torch.full((micro_batches, each * batching.kept_blocks(CONTEXT), widest), lost)
    tails = torch.full((batch, 2, widest), lost)
    written, ends = [[lost] * (CONTEXT + widest) for _ in range(batch)], [0] * batch
    for step, (wanted, span) in enumerate(steps):
        groups = [[n] for n in range(batch)] if alone else [list(range(batch))]
        for rows in groups:
            start = torch.tensor([min(wanted[n], ends[n], CONTEXT - span) for n in rows])
            told = known.step(start, span, torch.tensor(rows) if alone else None)
            size = len(rows) // (1 if alone else micro_batches)
            for k in range(1 if alone else micro_batches):
                parts = {name: value.reshape(1 if alone else micro_batches, -1)[k] for name, value in told.items()}
                slot = torch.full((size * (blocks + kept), widest), -9)
                for i, row in enumerate(parts[loads_name(0)].tolist()):
                    if row >= 0:
                        slot[i] = homes[0 if alone else k, row]
                mine = [rows[k * size + s] for s in range(size)]
                slot[parts["cache_before"]] = tails[mine].reshape(2 * size, widest)
                keys = slot[: size * blocks, : tokens[0]].reshape(size, -1).clone()
                made = slot[size * blocks :, : tokens[1]].reshape(size, -1).clone()
                for s, n in enumerate(mine):
                    keys[s, parts["restored_positions"].view(size, -1)[s]] = made[s] - 1000
                    first = int(start[k * size + s])
                    keys[s, first : first + span] = step
                    made[s, parts["checkpoint_rows"].view(size, -1)[s]] = step + 1000
                    written[n][first : first + span] = [step] * span
                    assert keys[s, : first + span].tolist() == written[n][: first + span]
                    ends[n] = first + span
                slot[: size * blocks, : tokens[0]] = keys.view(-1, tokens[0])
                slot[size * blocks :, : tokens[1]] = made.view(-1, tokens[1])
                tails[mine] = slot[parts["cache_behind"]].view(size, 2, widest)
                for i, row in enumerate(parts["cache_stores"].tolist()):
                    if row >= 0:
                        homes[0 if alone else k, row] = slot[i]


def test_a_start_behind_the_end_is_refused() -> None:
    known = CacheBlocks(plan_of(2, 1, 4))
    known.step(torch.tensor([0, 0]), 3)
    with pytest.raises(ValueError, match=r"start: \[3, 4\] does not continue"):
        known.step(torch.tensor([3, 4]), 1)
    with pytest.raises(ValueError, match="does not continue"):
        known.step(torch.tensor([0, 0]), CONTEXT + 1)


def test_only_what_exists_is_loaded_and_only_what_got_full_is_stored() -> None:
    known = CacheBlocks(plan_of(2, 1, 4))
    known.step(torch.tensor([0, 0]), 10)
    found = known.step(torch.tensor([10, 5]), 3)  # the second one goes back, into a block that left its tail
    loads = found["cache_loads"].view(2, -1)
    assert loads[0].tolist() == [0, 1, -1, -1, -1, -1]
    assert loads[1].tolist() == [6, 7, -1, -1, -1, -1]
    stores = found["cache_stores"].view(2, -1)
    assert stores[0].tolist() == [-1, -1, 2, -1, -1, -1]
    assert stores[1].tolist() == [-1, 7, -1, -1, -1, -1]
