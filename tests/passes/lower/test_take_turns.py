"""Every micro-batch runs through every piece once, in order, and weights are brought as often as the order says."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from forebay.passes.lower.take_turns import turns
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.ir.schedule.micro_batches import MicroBatches

blocks = st.builds(BatchSchedule, st.builds(MicroBatches, st.integers(1, 5), st.sampled_from(["row", "zigzag"])))


@given(st.integers(0, 6), blocks)
def test_each_micro_batch_runs_through_all_pieces_in_order(pieces: int, batching: BatchSchedule) -> None:
    found = list(turns(pieces, batching))
    for k in range(batching.micro_batches.count):
        assert [t.piece for t in found if t.micro_batch == k] == list(range(pieces))
    assert len(found) == pieces * batching.micro_batches.count


@given(st.integers(0, 6), blocks)
def test_weights_come_before_their_first_turn_and_leave_after_the_last(pieces: int, batching: BatchSchedule) -> None:
    here: set[int] = set()
    opened: Counter[int] = Counter()
    for turn in turns(pieces, batching):
        if turn.opens:
            assert turn.piece not in here
            here.add(turn.piece)
            opened[turn.piece] += 1
        assert turn.piece in here
        if turn.closes:
            here.remove(turn.piece)
    assert not here and set(opened.values()) <= {batching.micro_batches.fetches}


@given(st.integers(0, 6), st.integers(0, 3), blocks)
def test_the_last_pieces_are_behind_all_others(pieces: int, last: int, batching: BatchSchedule) -> None:
    found = list(turns(pieces + last, batching, last=last))
    assert found[: len(found) - last * batching.micro_batches.count] == list(turns(pieces, batching))
    assert [t.piece for t in found[len(found) - last * batching.micro_batches.count :]] == [
        pieces + i for i in range(last) for _ in range(batching.micro_batches.count)]
