"""What a session loads before its first step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from forebay.rewriter.ir.plan import Plan, PlanError
from forebay.rewriter.ir.program import FileSlice
from forebay.runtime.run.session import resident_copies
from tests.tiny import chain, placements, plan_for


def test_resident_weights_are_loaded_whole_into_their_memory(tmp_path: Path) -> None:
    model = chain(tmp_path, layers=2)
    plan = plan_for(placements(model, {"w1": 0}))
    copies = resident_copies(plan, model.files)
    assert [c.dst.buffer for c in copies] == ["w0", "b0", "b1"]
    assert all(c.src == model.files[c.dst.buffer] and c.src.nbytes == c.dst.nbytes for c in copies)
    places = {b.name: (b.arena, b.offset) for b in plan.buffers}
    assert all((c.dst.arena, c.dst.offset) == places[c.dst.buffer] for c in copies)


def halved(plan: Plan, *parts: str) -> Plan:
    """An edited plan that gives w0 half its bytes in these parts."""
    return replace(plan, **{part: tuple(replace(e, nbytes=e.nbytes // 2) if e.name == "w0" else e
                                        for e in getattr(plan, part)) for part in parts})


def test_a_weight_of_another_size_is_refused(tmp_path: Path) -> None:
    """Half of it would be loaded, or the whole over what lies behind its memory."""
    model = chain(tmp_path, layers=2)
    plan = plan_for(placements(model, {}))
    for edited in (halved(plan, "weights"), halved(plan, "buffers"), halved(plan, "weights", "buffers")):
        with pytest.raises(PlanError, match=r"plan.weights: w0 has \d+ bytes, but"):
            resident_copies(edited, model.files)
    whole = model.files["w0"]
    shorter = {**model.files, "w0": FileSlice(whole.path, whole.offset, whole.nbytes - 1)}
    with pytest.raises(PlanError, match=rf"w0 has {whole.nbytes} bytes, .* {whole.nbytes - 1} in .*weights.bin"):
        resident_copies(plan, shorter)
