"""Every micro-batch runs through every piece once, in order, and weights are brought as often as the order says."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from forebay.passes.lower.take_turns import turns
from forebay.rewriter.ir.block import Block

blocks = st.builds(Block, st.integers(1, 5), st.sampled_from(["row", "zigzag"]))


@given(st.integers(0, 6), blocks)
def test_each_micro_batch_runs_through_all_pieces_in_order(pieces: int, block: Block) -> None:
    found = list(turns(pieces, block))
    for k in range(block.micro_batches):
        assert [t.piece for t in found if t.micro_batch == k] == list(range(pieces))
    assert len(found) == pieces * block.micro_batches


@given(st.integers(0, 6), blocks)
def test_weights_come_before_their_first_turn_and_leave_after_the_last(pieces: int, block: Block) -> None:
    here: set[int] = set()
    opened: Counter[int] = Counter()
    for turn in turns(pieces, block):
        if turn.opens:
            assert turn.piece not in here
            here.add(turn.piece)
            opened[turn.piece] += 1
        assert turn.piece in here
        if turn.closes:
            here.remove(turn.piece)
    assert not here and set(opened.values()) <= {block.fetches}


@given(st.integers(0, 6), st.integers(0, 3), blocks)
def test_the_last_pieces_are_behind_all_others(pieces: int, last: int, block: Block) -> None:
    found = list(turns(pieces + last, block, last=last))
    assert found[: len(found) - last * block.micro_batches] == list(turns(pieces, block))
    assert [t.piece for t in found[len(found) - last * block.micro_batches :]] == [
        pieces + i for i in range(last) for _ in range(block.micro_batches)]
