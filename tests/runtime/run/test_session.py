"""What a session loads before its first step."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forebay.rewriter.ir.plan import Plan, PlanError
from forebay.rewriter.ir.program import (
    COMPUTE,
    LOAD,
    WRITE,
    Copy,
    FileSlice,
    Launch,
    Program,
    Record,
    Release,
    Span,
    TensorRef,
    Wait,
)
from forebay.rewriter.verify.program import verify_program
from forebay.runtime.devices.cpu.device import ThreadDevice
from forebay.runtime.disk.reader import open_reader
from forebay.runtime.disk.spill import SpillSpace
from forebay.runtime.run.session import Session, resident_copies
from forebay.runtime.run.step_inputs import StepInputs
from tests.carried import Carried
from tests.tiny import chain, placements, plan_for


def test_resident_weights_are_loaded_whole_into_their_memory(tmp_path: Path) -> None:
    model = chain(tmp_path, layers=2)
    plan = plan_for(placements(model, {"w1": 0}))
    copies = resident_copies(plan, model.files)
    assert [c.dst.buffer for c in copies] == ["w0", "b0", "b1"]
    assert all(c.src == model.files[c.dst.buffer] and c.src.nbytes == c.dst.nbytes for c in copies)
    batch_slots = {b.name: (b.arena, b.offset) for b in plan.buffers}
    assert all((c.dst.arena, c.dst.offset) == batch_slots[c.dst.buffer] for c in copies)


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


def test_what_one_program_stores_another_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill that stores, and a step that only loads: neither's own proof orders the two."""
    x, slot, out = (Span("device", 4096 * i, 4096, name) for i, name in enumerate(("x", "slot0:0", "out")))
    kept, page = Span("cache", 0, 4096, "k"), (4096,)
    ref = TensorRef("device", 8192, "uint8", page, (1,), "out")
    plan, files = Carried().plan(), {"cache": 4096}
    resident = {"x": x, "k": kept, "out": out}
    landed = replace(ref, offset=4096, buffer="slot0:0")
    copied = Launch(COMPUTE, "copy", (landed,), {}, (ref,), (slot,), (out,), "copy")
    before = (Record(WRITE, 3), Wait(WRITE, 3))
    stores = Program("prefill", (*before, Copy(WRITE, x, kept, "store")), (), plan.arenas, resident,
                     outputs={"out0": ref}, files=files)
    loads = Program("decode", (
        Record(COMPUTE, 2), Wait(LOAD, 2), Copy(LOAD, kept, slot, "load"), Record(LOAD, 1), Wait(COMPUTE, 1), copied,
        Release(COMPUTE, slot)), (), plan.arenas, resident, outputs={"out0": ref}, files=files)
    for program in (stores, loads):
        verify_program(program)
    wrote = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *given: (time.sleep(0.2), wrote(*given))[1])
    device = ThreadDevice(open_reader("direct"), spill=SpillSpace(str(tmp_path), "direct"))
    session = Session(plan, lambda tokens: stores if tokens == 2 else loads, (), {}, device)
    device.tensor(replace(ref, offset=0, buffer="x")).fill_(7)
    zero = torch.zeros(1, dtype=torch.int64)
    session.step(StepInputs(torch.zeros(1, 2, dtype=torch.int64), zero, zero))
    found = session.step(StepInputs(zero[None], zero, zero))
    assert (found == 7).all()
    session.close()
