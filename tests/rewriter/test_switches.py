"""The debugging switches: read from an environment, and doing what they say in the pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import captured
from tiny import chain, planned, run_program

from forebay.rewriter.ir.plan import Budget, load_plan
from forebay.rewriter.ir.program import Launch
from forebay.rewriter.pipeline.pass_list import PASSES, passes_in
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.pipeline.run_passes import StoppedAfter
from forebay.rewriter.switches import SwitchError, Switches, read_switches
from forebay.rewriter.verify.program import ProgramError

OPTIONAL = tuple(each.name for each in PASSES if each.optional)
FUSING, NAMES, LAST = ([each.name for each in passes_in(name)] for name in ("captured", "planned", "lowered"))
STAGES = [f"{i:02d}_{n}.{when}.py" for i, n in enumerate(NAMES) for when in ("before", "after")]
DRAFTS = [f"{i:02d}_{n}.txt" for i, n in enumerate(LAST[:-1], len(NAMES))]
SMALL = Budget(30_000)


def test_an_empty_environment_gives_the_defaults() -> None:
    assert read_switches({}) == Switches()


def test_every_switch_is_read() -> None:
    assert read_switches({
        "FOREBAY_DUMP": "/d", "FOREBAY_VERIFY": "0", "FOREBAY_SKIP": "a, b,", "FOREBAY_STOP_AFTER": " c ",
        "FOREBAY_BISECT": "1", "FOREBAY_SYNC": "true", "FOREBAY_POISON": "ON", "FOREBAY_NO_REUSE": "yes",
        "FOREBAY_GRAPHS": "off", "FOREBAY_PDL": "1", "UNRELATED": "x",
    }) == Switches("/d", False, ("a", "b"), "c", True, True, True, True, False, True)


@pytest.mark.parametrize("off", ["0", "false", "OFF", "no", " 0 "])
def test_off_in_every_spelling(off: str) -> None:
    assert read_switches({"FOREBAY_VERIFY": off, "FOREBAY_POISON": off}) == Switches(verify=False)


def test_graphs_are_verified_beside_programs_where_asked() -> None:
    assert read_switches({"FOREBAY_VERIFY": " Graphs"}) == Switches(verify_graphs=True)
    with pytest.raises(SwitchError, match="write 1 or 0, or graphs"):
        read_switches({"FOREBAY_VERIFY": "graph"})
    with pytest.raises(SwitchError, match=r"write 1 or 0$"):
        read_switches({"FOREBAY_POISON": "graphs"})


def test_steps_are_graphs_where_asked() -> None:
    assert read_switches({"FOREBAY_GRAPHS": " Steps"}) == Switches(graphs=True, whole_steps=True)
    with pytest.raises(SwitchError, match="write 1 or 0, or steps"):
        read_switches({"FOREBAY_GRAPHS": "graphs"})


@pytest.mark.parametrize("name", ["VERIFY", "BISECT", "SYNC", "POISON", "NO_REUSE", "GRAPHS"])
def test_anything_else_is_refused_by_name(name: str) -> None:
    with pytest.raises(SwitchError, match=f"FOREBAY_{name}='maybe'"):
        read_switches({f"FOREBAY_{name}": "maybe"})


@pytest.mark.parametrize("switches", [Switches(skip=("allocate_buffers",)), Switches(skip=("no_such",)),
                                      Switches(stop_after="no_such")])
def test_a_pass_that_cannot_be_skipped_or_is_not_there(tmp_path: Path, switches: Switches) -> None:
    with pytest.raises(SwitchError, match="hoist_prefetch"):
        chain(tmp_path, width=64).pipeline(switches)


@pytest.mark.parametrize("switches", [
    Switches(skip=("hoist_prefetch",)), Switches(skip=OPTIONAL), Switches(no_reuse=True), Switches(bisect=True),
    Switches(verify=False), Switches(no_reuse=True, skip=OPTIONAL),
])
def test_programs_compute_the_same_under_every_switch(tmp_path: Path, switches: Switches) -> None:
    model = chain(tmp_path, width=64)
    plan, program = planned(model, SMALL, switches=switches)
    assert plan.prediction.streamed_nbytes > 20_000
    for poison, sync in ((False, False), (True, False), (False, True)):
        got = run_program(program, plan, model, poison=poison, sync=sync)[0]
        torch.testing.assert_close(got, model.expected()[0], rtol=1e-5, atol=1e-5)


def test_no_reuse_gives_every_activation_its_own_memory(tmp_path: Path) -> None:
    model = chain(tmp_path, width=64)
    for no_reuse in (False, True):
        plan, _ = planned(model, SMALL, switches=Switches(no_reuse=no_reuse))
        batch_slots = [(b.offset, b.nbytes) for b in plan.buffers if b.phase == "decode"]
        shared = sum(a < d + e and d < a + b for i, (a, b) in enumerate(batch_slots) for d, e in batch_slots[i + 1 :])
        assert (shared == 0) is no_reuse


@pytest.mark.parametrize("name", [*NAMES, *LAST])
def test_stop_after_stops_there_and_leaves_the_dump(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "dump"
    with pytest.raises(StoppedAfter, match=name):
        planned(chain(tmp_path, width=64), SMALL, switches=Switches(stop_after=name, dump=str(folder)))
    written = sorted(p.name for p in (folder / "1_tokens").iterdir())
    whole = [*sorted(STAGES, key=lambda s: (s[:2], "after" in s)), *DRAFTS, "program.txt"]
    ends = 2 * NAMES.index(name) + 2 if name in NAMES else len(STAGES) + LAST.index(name) + 1
    assert written == sorted(whole[:ends])


@pytest.mark.parametrize("name", FUSING)
def test_stop_after_a_pass_on_captured_graphs(tmp_path: Path, name: str) -> None:
    """Whether the pass has something to do or not."""
    switches = Switches(stop_after=name, dump=str(tmp_path))
    with pytest.raises(StoppedAfter, match=name):
        rewrite_captured(captured("llama"), switches)
    fusing = FUSING[: FUSING.index(name) + 1]
    done = [each.name for each in PASSES if each.name in fusing and not each.asked]
    assert sorted(p.name for p in (tmp_path / "captured").iterdir()) == sorted(
        f"{i:02d}_{n}.{when}.py" for i, n in enumerate(done) for when in ("before", "after"))


def test_a_dump_shows_what_a_pass_did_in_every_block(tmp_path: Path) -> None:
    rewrite_captured(captured("gemma2"), Switches(dump=str(tmp_path)))
    (dumped,) = (tmp_path / "captured").glob("*_fuse_rotary.after.py")
    after = dumped.read_text()
    assert "# block_0" in after and "# block_1" in after and after.count("by fuse_rotary") == 4


def test_a_draft_is_dumped_before_and_after_its_copies_are_ordered(tmp_path: Path) -> None:
    _, program = planned(chain(tmp_path, width=64), SMALL, switches=Switches(dump=str(tmp_path)))
    folder = tmp_path / "1_tokens"
    before, shared, joined, delegated, gathered, own, after, away = (
        (folder / name).read_text().splitlines() for name in DRAFTS)
    assert own == gathered == delegated == joined == shared == before, (
        "no ranges of scores are known, no launches are joined, nothing attends on the host, nobody gathers weights, "
        "no feature has steps")
    assert away == after, "no hidden states leave the device"
    assert before[0] == "prologue ()" and after[0] == f"prologue {tuple(range(len(program.prologue) // 2))}"
    fetches = [line.split()[2] for line in before if line.startswith("Fetch")]
    assert all(name.startswith("w") for name in fetches) and "release" in {line.split()[0] for line in before}
    assert len(fetches) == sum(line.startswith("Arrive") for line in before) > 2
    for text in (before, after):
        assert [line.split()[1] for line in text if line.startswith("launch")] == [
            i.label for i in program.step if isinstance(i, Launch)]


def test_dump_writes_every_stage_and_a_plan_that_loads(tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    plan, program = planned(chain(tmp_path, width=64), SMALL, switches=Switches(dump=str(folder)))
    assert load_plan(folder / "plan.json") == plan
    folder_of_step = folder / "1_tokens"
    assert sorted(p.name for p in folder_of_step.iterdir()) == sorted([*STAGES, *DRAFTS, "program.txt"])
    before, after = ((folder_of_step / f"01_insert_transfers.{when}.py").read_text() for when in ("before", "after"))
    assert "fetch" not in before and "by insert_transfers" in after and "Transfer(index=0" in after
    assert "float32[2, 64]" in before
    text = (folder_of_step / "program.txt").read_text()
    assert len(text.splitlines()) == 3 + len(program.prologue) + len(program.step)
    assert all(i.label in text for i in program.step if isinstance(i, Launch)) and "weights.bin[" in text


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = chain(tmp_path, width=64)
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    planned(model, SMALL)
    assert list(empty.iterdir()) == []


def test_verify_is_on_unless_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import forebay.rewriter.pipeline.step_pipeline as pipeline

    def refuse(*args: object) -> None:
        raise ProgramError("asked")

    monkeypatch.setattr(pipeline, "verify_program", refuse)
    planned(chain(tmp_path, width=64), SMALL, switches=Switches(verify=False))
    with pytest.raises(ProgramError, match="asked"):
        planned(chain(tmp_path, width=64), SMALL)
