"""Steps of a model that draft for it in its own memory: the tokens of the model alone, and nothing of it is touched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from budgets import WITH_KERNELS
from e2e.drafting import Paying, refused
from families import FAMILIES
from selection import ALL, at_length

import forebay.rewriter.pipeline.plan_task as plan_task
from forebay import drafted
from forebay.api import wrap
from forebay.drafting import drafting, files_in_budget, plans_in_budget
from forebay.language_model import LanguageModel
from forebay.rewriter.ir.plan import PlanError
from forebay.rewriter.ir.program import Copy, Launch, Record, Rows, Span, Wait
from forebay.rewriter.pipeline.lay_beside import EVENTS, check_beside
from forebay.runtime.run.draft_choice import DraftChoice
from forebay.runtime.run.generation import Stop, generate_tokens
from forebay.runtime.run.progress import WorkDone
from forebay.runtime.run.request import Request
from forebay.runtime.run.sampling import Sampling
from forebay.runtime.run.shared_drafts import SharedDrafter

NEW = 24
PROMPTS = [torch.tensor(ids) for ids in ([5, 6, 7, 8, 9] * 4, [11, 12, 13], [3, 4, 5, 6, 3, 4, 5], [9])]


@pytest.fixture(autouse=True)
def shared_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No copy has memory of its own, and three tokens are drafted whatever is predicted."""
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(drafted, "draft_apart", refused)
    monkeypatch.setattr(DraftChoice, "_worth", lambda *_: (3, 0.0))


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    made = tmp_path_factory.mktemp(request.param)
    transformers.AutoModelForCausalLM.from_config(FAMILIES[request.param](3)).eval().save_pretrained(made)
    return made


def drafting_model(folder: Path, share: float = 0.5, draft: str = "w8", **options: Any) -> LanguageModel:
    """Planned so that such a share of the weights stays beside the smallest plan, and so many tokens are drafted."""
    fixed: Any = dict(prompt=20, new_tokens=NEW, prompt_lookup_num_tokens=3, **options)
    with wrap(folder, 1 << 28, **fixed) as whole:
        least = whole.steps.pipeline.smallest_budget(whole.options)
        nbytes = least + int(share * whole.captured.weight_nbytes)
    lm = wrap(folder, nbytes, draft=draft, **fixed)
    assert lm.shared_draft is not None and lm.helper is None
    assert lm.plan.prediction.streamed_nbytes and lm.budget.device == nbytes
    return lm


FEW = [("llama", "native", 0.5), at_length("opt", "native", 0.7), ("gpt2", "kv8", 0.5),
       at_length("gemma2", "native", 0.6)]
SOME = [(family, cache, share) for family in FAMILIES for cache in ("native", "kv8") for share in (0.5, 0.8)]


@pytest.mark.parametrize(("folder", "cache", "share"), SOME if ALL else FEW, indirect=["folder"])
def test_tokens_are_those_of_the_model_alone(folder: Path, cache: str, share: float) -> None:
    """All families under FOREBAY_TEST_ALL=1."""
    with drafting_model(folder, share, batch=4, cache=cache) as lm, lm.running(4, 20, NEW) as session:
        for count in (1, 4):
            prompts = PROMPTS[:count]
            free = generate_tokens(session, prompts, Sampling(), Stop(NEW))
            eos = frozenset(free[:, [NEW // 3, NEW // 2]].flatten().tolist())
            for stop in (Stop(NEW), Stop(NEW, eos)):
                plain, tally = generate_tokens(session, prompts, Sampling(), stop), WorkDone()
                with drafting(None, session, prompts, NEW, Sampling(), None) as drafter:
                    assert isinstance(drafter, SharedDrafter)
                    found = generate_tokens(session, prompts, Sampling(), stop, None, None, drafter, tally)
                assert torch.equal(found, plain)
                assert plain.shape[1] == 1 or (tally.offered and tally.accepted > tally.offered / 2)


def test_what_is_resident_is_shared_and_all_is_within_the_budget(llama_checkpoint: Any) -> None:
    with drafting_model(llama_checkpoint.folder, 0.75) as lm:
        shared, main = lm.steps.drafts.split.shared, lm.plan  # type: ignore[union-attr]
        assert shared is not None
        resident = {w.name for w in main.weights if w.tier == "device" and w.nbytes > 4096}
        assert resident and not resident & set(shared.own) and shared.own
        at = {b.name: (b.offset, b.nbytes) for b in main.buffers if b.kind in ("weight", "cache", "constant")
              and b.phase != "prefill"}
        beside = {b.name: (b.offset, b.nbytes) for b in shared.draft.buffers}
        assert all(beside[name] == at[name] for name in at if name in beside and name not in shared.own)
        assert {name for name in at if name.startswith("cache")} <= beside.keys()
        assert all(beside[name][0] >= main.arenas["device"] for name in shared.own)
        formats = {w.name: w.format for w in shared.draft.weights}
        assert {formats[name] for name in shared.own if name.endswith("proj.weight")} == {"w8g64"}
        assert shared.program.streamed_nbytes() == 0 and not shared.program.prologue
        mine = {i.event for i in shared.program.step if isinstance(i, Record | Wait)}
        theirs = {i.event for size in main.schedule.step_sizes for i in lm.steps.pipeline.program(main, size).items(1)
                  if isinstance(i, Record | Wait)}
        assert min(mine, default=EVENTS) >= EVENTS > max(theirs)
        (together,) = plans_in_budget(lm)
        programs = [shared.program, *(lm.steps.pipeline.program(main, size) for size in main.schedule.step_sizes)]
        for program in programs:  # each beside all that both keep
            assert together.arenas["device"] + program.workspace_nbytes() <= lm.budget.device
        assert together.prediction.peak_nbytes["device"] <= lm.budget.device
        assert together.prediction.peak_nbytes["device"] >= together.arenas["device"] + max(
            program.workspace_nbytes() for program in programs)
        assert together.budget.device == lm.budget.device > main.budget.device
        assert len(files_in_budget(lm)) == 2
        told = lm.explain()
        assert "The draft's step, in the memory of this plan" in told and "share its cache" in told
        assert "w8g64 weights" in told and "of cache" in told and "its own" in told


@pytest.mark.parametrize("folder", ["llama", "gpt2"] if ALL else ["llama"], indirect=True)
@pytest.mark.parametrize("batch", [1, 4] if ALL else [4])
def test_every_budget_is_kept(folder: Path, batch: int) -> None:
    """Steps of the model take their workspace beside what is the draft's, and the other way round."""
    fixed: Any = dict(prompt=60, new_tokens=NEW, prompt_lookup_num_tokens=3, batch=batch)
    with wrap(folder, 1 << 28, **fixed) as whole:
        least, nbytes = whole.steps.pipeline.smallest_budget(whole.options), whole.captured.weight_nbytes
    found = 0
    for i in range(steps := 20 if ALL else 3):
        budget = least + int((0.35 + 0.6 * i / steps) * nbytes) + 64 * i
        try:
            lm = wrap(folder, budget, draft="w4", **fixed)
        except PlanError:
            continue
        with lm:
            shared, main = lm.steps.drafts.split.shared, lm.plan  # type: ignore[union-attr]
            if shared is not None:
                found += 1
                top = max(main.arenas["device"], shared.draft.arenas["device"])
                for program in (shared.program, *map(lm.steps.program, main.schedule.step_sizes)):
                    assert top + program.workspace_nbytes() <= budget
    assert found > 1


def test_a_step_that_writes_what_is_the_models_is_refused(llama_checkpoint: Any) -> None:
    with drafting_model(llama_checkpoint.folder, 0.5) as lm:
        shared, main = lm.steps.drafts.split.shared, lm.plan  # type: ignore[union-attr]
        assert shared is not None
        check_beside(shared.program, shared.draft, main)
        weight = next(b for b in main.buffers if b.kind == "weight")
        slot = next(b for b in main.buffers if b.kind == "slot")
        steps = list(shared.program.step)
        i, launch = next((i, item) for i, item in enumerate(steps) if isinstance(item, Launch) and item.writes)
        for b in (weight, slot):
            steps[i] = replace(launch, writes=(Span("device", b.offset, 64, b.name),))
            with pytest.raises(PlanError, match="where the model has something else"):
                check_beside(replace(shared.program, step=tuple(steps)), shared.draft, main)
        moved = [replace(b, offset=b.offset + 64) if b.name == weight.name else b for b in shared.draft.buffers]
        with pytest.raises(PlanError, match=f"{weight.name} is not where"):
            check_beside(shared.program, replace(shared.draft, buffers=tuple(moved)), main)


@pytest.mark.parametrize("admitted", [at_length(False), True])
def test_sequences_in_places_have_drafts(llama_checkpoint: Any, admitted: bool) -> None:
    """More of them than slots, of unequal lengths, drawn or not: the tokens of each alone."""
    batch_slots: Any = dict(batch_slots=2) if admitted else dict(batch=2)
    rows = [*PROMPTS, *PROMPTS[:2]]
    with drafting_model(llama_checkpoint.folder, 0.5, **batch_slots) as lm, wrap(
            llama_checkpoint.folder, llama_checkpoint.share(3.5), prompt=20, new_tokens=NEW) as plain:
        for sampling in (Sampling(), Sampling(True, 0.8, 5, 0.9)):
            asked = [Request(ids, NEW - 3 * i, lambda i=i: torch.Generator().manual_seed(i))
                     for i, ids in enumerate(rows)]
            found: dict[int, list[int]] = {}
            work = lm.answer_all(asked, sampling, frozenset(), on_end=found.__setitem__, on_step=lambda work: None)
            assert work.offered and (sampling.do_sample or work.accepted > work.offered / 2)
            with plain.running(1, 20, NEW) as session:
                for i, each in enumerate(asked):
                    alone = generate_tokens(session, [each.ids], sampling, Stop(each.new_tokens),
                                            [torch.Generator().manual_seed(i)])
                    assert found[i] == alone[0].tolist()


def test_drawn_drafts_stand_by_rejection_sampling(llama_checkpoint: Any) -> None:
    """In 8 bits a model gives nearly its own distribution, so nearly all that is drawn stands."""
    with drafting_model(llama_checkpoint.folder, 0.5) as lm:
        drawn = lm.generate(llama_checkpoint.ids[:1], max_new_tokens=NEW, do_sample=True, eos_token_id=None,
                            generator=torch.Generator().manual_seed(1))
        assert drawn.shape[1] == 10 + NEW and lm.tally.offered and lm.tally.accepted > 0.8 * lm.tally.offered


def test_longer_answers_are_planned_anew_and_closed_ones_loaded_again(llama_checkpoint: Any) -> None:
    ids, options = llama_checkpoint.ids, dict(max_new_tokens=30, pad_token_id=0, eos_token_id=None, do_sample=False)
    with torch.no_grad():
        expected = llama_checkpoint.model.generate(ids, **options)
    with drafting_model(llama_checkpoint.folder, 0.6) as lm:
        nbytes = lm.budget.device
        for _ in range(2):
            assert torch.equal(lm.generate(ids, **options), expected) and lm.tally.offered
            assert lm.shared_draft is not None
            assert plans_in_budget(lm)[0].arenas["device"] <= nbytes
            lm.close()


@pytest.mark.parametrize("host", ["800KiB", at_length("4MiB")])
def test_through_host_slots_as_a_gpu_would(
    llama_checkpoint: Any, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """What passes through host memory lands where the model's does, and rows of a lookup that are there come from
    there; the host's budget is one too."""
    source = plan_task.step_graphs
    monkeypatch.setattr(plan_task, "step_graphs", lambda *a, **k: source(*a, **k | {"host_hop": True}))
    ids, options = llama_checkpoint.ids[:1], dict(max_new_tokens=NEW, pad_token_id=0, eos_token_id=None)
    with torch.no_grad():
        expected = llama_checkpoint.model.generate(ids, do_sample=False, **options)
    with wrap(llama_checkpoint.folder, f"device=1200KiB,host={host}", prompt=20, new_tokens=NEW, draft="w8",
              prompt_lookup_num_tokens=3) as lm:
        shared = lm.steps.drafts.split.shared  # type: ignore[union-attr]
        assert shared is not None and lm.plan.schedule.host_hop
        assert torch.equal(lm.generate(ids, do_sample=False, **options), expected) and lm.tally.offered
        looked_up = next(i for i in shared.program.step if isinstance(i, Copy) and isinstance(i.src, Rows))
        assert isinstance(looked_up.src.table, Span) is (host == "4MiB") and looked_up.dst.arena == "host"  # type: ignore[union-attr]


def test_where_it_cannot_be_it_says_why(llama_checkpoint: Any) -> None:
    fixed: Any = dict(prompt=20, new_tokens=NEW, draft="w8")
    with wrap(llama_checkpoint.folder, 1 << 28, **fixed) as whole:
        nbytes = whole.steps.pipeline.smallest_budget(whole.options) + (32 << 10)
    with wrap(llama_checkpoint.folder, nbytes, **fixed) as lm:
        assert lm.shared_draft is None and "no room for packed rows" in lm.explain()
        assert lm.plan.budget.device == nbytes
    with wrap(llama_checkpoint.folder, 1 << 28, **fixed) as lm:
        assert lm.shared_draft is None and "no weight streams" in lm.explain()
    with wrap(llama_checkpoint.folder, llama_checkpoint.share(2.0), cache_tier="disk", **fixed) as lm:
        assert lm.shared_draft is None and "whole cache lies on the device" in lm.explain()
    with pytest.raises(PlanError, match=r"none by itself; by steps .* itself, a device budget of .* packed"):
        wrap(llama_checkpoint.folder, nbytes, prompt_lookup_num_tokens=3, **fixed)


@pytest.mark.all
@WITH_KERNELS
def test_what_stood_is_kept_for_such_a_share_of_packed_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where it was seldom, the next plan drafts nothing."""
    monkeypatch.undo()
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(drafted, "draft_apart", refused)
    case = Paying(tmp_path / "model")
    nbytes, options = case.nbytes, case.options
    with wrap(tmp_path / "model", nbytes, **options) as lm:
        assert lm.shared_draft is not None and 0 < lm.steps.drafts.split.shared.packed < 1  # type: ignore[union-attr]
        assumed = 1 - lm.steps.drafts.split.shared.packed * 0.05  # type: ignore[union-attr]
        assert lm.steps.drafts.seen.chance == pytest.approx(assumed)
        assert f"{100 * assumed:.0f} % are assumed" in lm.explain()
        for seldom in (False, True):
            if seldom:
                lm.shared_draft.record.add(2, 500)  # type: ignore[union-attr]
            found = lm.generate(case.ids, **case.asked, eos_token_id=None)
            assert torch.equal(found, case.expected)
            assert (lm.shared_draft is None) is seldom
            assert seldom or lm.shared_draft.record.known > 0  # type: ignore[union-attr]
        assert lm.plan.budget.device == nbytes
    with wrap(tmp_path / "model", nbytes, **options) as lm:
        assert lm.shared_draft is None and "would not pay" in lm.explain()


def test_rows_that_draft_nothing_keep_what_they_hold(llama_checkpoint: Any) -> None:
    """Drafts for one sequence of four: the caches of the others are as they were up to their last position."""
    with drafting_model(llama_checkpoint.folder, 0.5, batch=4) as lm, lm.running(4, 20, NEW) as session:
        plain = generate_tokens(session, PROMPTS, Sampling(), Stop(2))
        before = _cache(lm, session)
        drafter = SharedDrafter(session, Sampling(), [None] * 4)
        held = {1: torch.cat((PROMPTS[1], plain[1]))}
        (draft,) = drafter.draft(held, {1: 3}).values()
        assert len(draft.tokens) == 3 and not drafter.prefill_s, "the prompt's cache is the model's"
        begins = len(held[1]) - 1
        for name, value in _cache(lm, session).items():
            same = value == before[name]
            assert bool(same[[0, 2, 3], :, :-1].all()) and bool(same[1, :, :begins].all()), name
            assert not bool(same[1, :, begins : begins + 3].all()), "what is drafted behind is"


def _cache(lm: LanguageModel, session: Any) -> dict[str, torch.Tensor]:
    program = lm.steps.program(1)
    refs = {ref.buffer: ref for i in program.step if isinstance(i, Launch) for ref in i.args
            if hasattr(ref, "buffer") and ref.buffer.startswith("cache_") and len(ref.shape) == 4}
    assert refs
    return {name: session.device.tensor(ref).clone() for name, ref in refs.items()}
