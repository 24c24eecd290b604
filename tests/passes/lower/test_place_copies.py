"""What stores become: copies outward, the events that order them, and no event that is not needed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from carried import Carried

from forebay.passes.lower.place_copies import place_copies
from forebay.rewriter.ir.draft import Draft, Evict, Outgoing, Store
from forebay.rewriter.ir.program import (
    COMPUTE,
    DOWNLOAD,
    LOAD,
    RETURN,
    WRITE,
    Copy,
    Launch,
    Record,
    Release,
    Span,
    Wait,
)
from forebay.rewriter.verify.program import ProgramError, verify_program

KINDS = [Carried(layers, k, tier, hop, ahead) for layers, k in ((3, 2), (1, 1), (2, 1), (2, 3))
         for tier, hop in (("disk", False), ("disk", True), ("host", False), ("host", True)) for ahead in (False, True)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_stores_and_loads_are_proved_and_each_wait_is_needed(kind: Carried) -> None:
    program = kind.program()
    verify_program(program, {"disk": kind.turns * 4096})
    waits = [i for i, item in enumerate(program.step) if isinstance(item, Wait)]
    assert len(waits) >= 3 * kind.turns
    for i in waits:
        with pytest.raises(ProgramError):
            verify_program(replace(program, step=(*program.step[:i], *program.step[i + 1:])))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.turns > 2], ids=str)
def test_each_record_release_and_load_is_needed(kind: Carried) -> None:
    """But for records that nobody waits for. (What a lost store leaves in its target bears the same name.)"""
    program = kind.program()
    waited = {item.event for item in program.step if isinstance(item, Wait)}
    for i, item in enumerate(program.step):
        if ((isinstance(item, Record) and item.event in waited) or isinstance(item, Release)
                or (isinstance(item, Copy) and item.stream in (LOAD, RETURN))):
            with pytest.raises(ProgramError):
                verify_program(replace(program, step=(*program.step[:i], *program.step[i + 1:])))


def copies(kind: Carried) -> Counter[str]:
    return Counter(item.stream for item in kind.program().step if isinstance(item, Copy))


def test_without_a_gpu_bytes_go_to_the_disk_directly_with_one_through_host_slots() -> None:
    assert copies(Carried()) == {LOAD: 6, WRITE: 6}
    assert copies(Carried(hop=True)) == {LOAD: 6, RETURN: 6, DOWNLOAD: 6, WRITE: 6}
    assert copies(Carried(tier="host")) == copies(Carried(tier="host", hop=True)) == {RETURN: 6, DOWNLOAD: 6}
    hop = Carried(hop=True).program()
    landed = [i.dst for i in hop.step if isinstance(i, Copy) and i.stream == DOWNLOAD]
    assert [s.buffer for s in landed if isinstance(s, Span)] == [f"host_out{n % 2}:{n}" for n in range(6)]


def test_a_store_whose_source_lives_on_is_waited_for_and_not_released() -> None:
    """As a tail on the device does, of which whole blocks leave."""
    x, kept = Span("device", 0, 4096, "x"), Span("cache", 0, 4096, "c")

    def write(label: str) -> Launch:
        return Launch(COMPUTE, "op", (), {}, (), (), (x,), label)

    draft = Draft("tail", [write("first"), Store(0), Evict(0), write("second")], resident={"x": x, "c": kept},
                  stores=[Outgoing("store x", x, kept, keeps=True)], files={"cache": 4096})
    program = place_copies(draft, Carried().plan())
    verify_program(program)
    assert not [i for i in program.step if isinstance(i, Release)]
    draft.items.remove(Evict(0))
    with pytest.raises(ProgramError, match=r"second on compute overwrites x .* store x on write may still read"):
        verify_program(place_copies(draft, Carried().plan()))


def test_slots_of_the_host_are_free_again_when_the_step_ends() -> None:
    program = Carried(hop=True).program()
    ends = [i.span.buffer for i in program.step if isinstance(i, Release) and i.stream == DOWNLOAD]
    assert sorted(ends) == sorted(f"host_out{n % 2}:{n}" for n in range(6))
