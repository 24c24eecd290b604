"""A model and what drafts for it in one budget: the tokens of the model alone, memory of both within the budget."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from budgets import WITH_KERNELS
from e2e.drafting import Paying, refused
from families import llama
from selection import ALL, at_length
from typer.testing import CliRunner

from forebay import drafted
from forebay.api import wrap
from forebay.commands.app import app
from forebay.rewriter.checkpoints import resolve
from forebay.rewriter.checkpoints.conversions import list_conversions
from forebay.rewriter.checkpoints.quantize import Wish, quantize_model
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.checkpoints.resolve import packed_copy
from forebay.rewriter.ir.plan import PlanError
from forebay.rewriter.pipeline.plan_draft import MIN_SPEEDUP
from forebay.runtime.run import draft_choice
from forebay.runtime.run.draft_choice import DraftChoice
from forebay.runtime.run.drafts_ahead import DraftsAhead
from forebay.runtime.run.generation import Stop, generate_tokens
from forebay.runtime.run.request import Request
from forebay.runtime.run.sampling import Sampling


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of the same vocabulary."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("smaller")
    config = llama(1, hidden_size=32, intermediate_size=64, vocab_size=997)
    transformers.AutoModelForCausalLM.from_config(config).eval().save_pretrained(folder)
    return folder




@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whatever is predicted, three tokens are drafted, the next ones beside each pass; whether those were of use."""
    found: list[bool] = []
    ready = DraftsAhead.ready

    def note(self: DraftsAhead, *asked: Any) -> Any:
        under_way = self._future is not None
        drafts = ready(self, *asked)
        found.extend([bool(drafts)] * under_way)
        return drafts

    monkeypatch.setattr(DraftChoice, "_worth", lambda *_: (3, 0.0))
    monkeypatch.setattr(draft_choice, "pays_beside", lambda *_: True)
    monkeypatch.setattr(DraftsAhead, "ready", note)
    return found


@pytest.mark.parametrize("own", [False, True] if ALL else [False])
def test_tokens_are_those_of_the_model_alone(
    llama_checkpoint: Any, smaller: Path, own: bool, begun: list[bool]
) -> None:
    ids, options = llama_checkpoint.ids, dict(max_new_tokens=16, pad_token_id=0, eos_token_id=None, do_sample=False)
    with torch.no_grad():
        expected = llama_checkpoint.model.generate(ids, **options)
    nbytes = llama_checkpoint.share(3.5)
    with wrap(llama_checkpoint.folder, nbytes, batch=3, prompt=10, new_tokens=8, prompt_lookup_num_tokens=3,
              draft=llama_checkpoint.folder if own else smaller) as lm:
        for _ in range(2 if ALL else 1):
            assert torch.equal(lm.generate(ids, **options), expected)
            assert lm.tally.offered and (lm.tally.accepted == lm.tally.offered) is own
            assert any(begun) and all(begun[:-1]) if own else not any(begun)  # the last was for an answer that ended
            begun.clear()
            assert lm.helper is not None and lm.helper._session is not None
            parts = lm.plan.budget, lm.helper.plan.budget
            assert sum(part.device for part in parts) <= nbytes, "planned anew for more, and still in one budget"
            assert lm.plan.arenas["device"] + lm.helper.plan.arenas["device"] <= nbytes
            assert lm.helper.budget.limits == parts[1] and lm.plan.workload.new_tokens == 16
        assert "The plan of the draft" in lm.explain() and "of drafted tokens right" in lm.explain()
        lm.close()
        assert lm._session is None and lm.helper._session is None


@pytest.mark.parametrize("own", [at_length(False), True])
def test_what_enters_places_has_drafts_too(
    llama_checkpoint: Any, smaller: Path, own: bool, begun: list[bool]
) -> None:
    """More prompts than slots, drawn or not: the tokens of each alone, with drafts in a part of the budget."""
    rows = [row[row != 0] for row in llama_checkpoint.ids]
    nbytes = llama_checkpoint.share(4.5)
    with wrap(llama_checkpoint.folder, nbytes, batch_slots=2, prompt=10, new_tokens=12, prompt_lookup_num_tokens=3,
              draft=llama_checkpoint.folder if own else smaller) as lm, wrap(
            llama_checkpoint.folder, nbytes, prompt=10, new_tokens=12) as plain:
        assert lm.plan.schedule.batching.admitted and lm.plan.schedule.speculative_steps and lm.helper is not None
        assert lm.helper.plan.workload.batch == 2 and lm.helper.plan.schedule.batching.admitted
        assert lm.plan.arenas["device"] + lm.helper.plan.arenas["device"] <= nbytes
        for sampling in (Sampling(), Sampling(True, 0.8, 5, 0.9)):
            asked = [Request(ids, 12 - i, lambda i=i: torch.Generator().manual_seed(i)) for i, ids in enumerate(
                [*rows, *rows])]
            found: dict[int, list[int]] = {}
            work = lm.answer_all(asked, sampling, frozenset(), on_end=found.__setitem__, on_step=lambda work: None)
            with plain.running(1, 10, 12) as session:
                for i, each in enumerate(asked):
                    draws = [torch.Generator().manual_seed(i)]
                    alone = generate_tokens(session, [each.ids], sampling, Stop(each.new_tokens), draws)
                    assert found[i] == alone[0].tolist()
            assert work.offered and (work.accepted == work.offered) >= (own and not sampling.do_sample)
            assert begun and any(begun) >= own
        assert torch.equal(lm.generate(llama_checkpoint.ids, max_new_tokens=12, pad_token_id=0, eos_token_id=None,
                                       do_sample=False), llama_checkpoint.model.generate(
            llama_checkpoint.ids, max_new_tokens=12, pad_token_id=0, eos_token_id=None, do_sample=False))
        assert lm.tally.tokens == len(rows) * 12 and lm.tally.offered >= lm.tally.accepted + lm.tally.refused
        assert lm.tally.decodes >= max(lm.tally.steps) > 1 and "drafted tokens accepted" in str(lm.tally)
        lm.close()
        assert lm._session is None and lm.helper._session is None


def test_where_no_draft_pays_none_is_taken_and_it_is_said(llama_checkpoint: Any) -> None:
    """Equal models: a drafted token costs a token."""
    with wrap(llama_checkpoint.folder, llama_checkpoint.share(3.5), prompt=10, new_tokens=8,
              draft=llama_checkpoint.folder) as lm, wrap(
            llama_checkpoint.folder, llama_checkpoint.share(3.5), prompt=10, new_tokens=8) as plain:
        assert MIN_SPEEDUP > 1 and lm.helper is None and lm.plan == plain.plan
        assert "draft       none, for it would not pay: " in lm.explain()
        assert torch.equal(*(each.generate(llama_checkpoint.ids[:1], max_new_tokens=4, do_sample=False)
                             for each in (lm, plain)))


@pytest.mark.all
def test_a_budget_without_room_for_both_says_what_is_lacking(llama_checkpoint: Any) -> None:
    options: Any = dict(prompt=10, new_tokens=8, draft=llama_checkpoint.folder)
    nbytes = llama_checkpoint.share(0.3)
    with wrap(llama_checkpoint.folder, nbytes, **options) as lm:
        assert lm.helper is None and lm.steps.drafts.split.told.startswith("none: ") and lm.plan.budget.device == nbytes  # type: ignore[union-attr]
    for short in (nbytes, llama_checkpoint.share(1.0)):  # of the draft's part, and of the model's beside it
        with pytest.raises(PlanError, match=r"draft: .* both; the smallest that can is .* \(\d+ bytes: ") as refused:
            wrap(llama_checkpoint.folder, short, prompt_lookup_num_tokens=3, **options)
    least = int(str(refused.value).partition(" bytes: ")[0].rpartition("(")[2])
    with wrap(llama_checkpoint.folder, least, prompt_lookup_num_tokens=3, **options) as lm:
        assert lm.helper is not None and lm.plan.schedule.speculative_steps
    with pytest.raises(PlanError, match=rf"the smallest that can is .* \({least} bytes: "):
        wrap(llama_checkpoint.folder, least - 1, prompt_lookup_num_tokens=3, **options)
    with pytest.raises(PlanError, match="draft: a plan that is replayed"):
        wrap(llama_checkpoint.folder, nbytes, plan=lm.plan, **options)


def test_a_copy_in_fewer_bits_drafts_and_is_made_once_of_these_weights(
    llama_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(DraftChoice, "_worth", lambda *_: (3, 0.0))
    folder = Path(shutil.copytree(llama_checkpoint.folder, tmp_path / "model"))
    ids, options = llama_checkpoint.ids[:1], dict(max_new_tokens=8, eos_token_id=None, do_sample=False)
    with torch.no_grad():
        expected = llama_checkpoint.model.generate(ids, pad_token_id=0, **options)
    with wrap(folder, llama_checkpoint.share(3.5), prompt=10, new_tokens=8, prompt_lookup_num_tokens=3,
              draft="w4") as lm:
        assert torch.equal(lm.generate(ids, **options), expected) and lm.helper is not None and lm.tally.offered
        packed = lm.helper.checkpoint
        matrices = {name for name, tensor in packed.tensors.items() if len(tensor.shape) == 2}
        assert {packed.tensors[name].packed.format for name in matrices} == {"w4g64", "w8g64"}
        assert packed.tensors["lm_head.weight"].packed.format == "w8g64"
    assert resolve.draft_copies(folder, llama_checkpoint.share(0.2)) == ("w4",)
    assert resolve.draft_copies(packed.folder, 1 << 30) == ("w4",), "of packed weights none is smaller"
    with wrap(folder, llama_checkpoint.share(3.5), prompt=10, new_tokens=8, prompt_lookup_num_tokens=3,
              draft="auto") as lm:
        assert torch.equal(lm.generate(ids, **options), expected) and lm.helper is not None
        assert lm.helper.checkpoint.folder == packed_copy(folder, "w8g64")
    with monkeypatch.context() as once:
        once.setattr(resolve, "quantize_model", lambda *_, **__: pytest.fail("there is one"))
        assert packed_copy(folder, "w4g64") == packed.folder
    assert packed_copy(folder, "w8g64") != packed.folder
    weights = next(folder.glob("*.safetensors"))
    shutil.copyfile(weights, tmp_path / "other")
    (tmp_path / "other").replace(weights)  # of the same size and contents, but who knows
    assert packed_copy(folder, "w4g64") != packed.folder
    states = {each.name: each.state for each in list_conversions()}
    assert states.pop(packed.folder.name) == "changed" and len(states) == 2


@WITH_KERNELS
def test_a_draft_whose_tokens_seldom_stand_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What answers have shown counts for the next one, and for the next process; predicted times are a guess's."""
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(drafted, "draft_beside", refused)
    case = Paying(tmp_path / "model")
    nbytes, options = case.nbytes, case.options
    with wrap(tmp_path / "model", nbytes, **options | {"draft": "w4"}) as lm:
        assert lm.helper is None and "would not pay on texts where 56 % are right" in lm.explain()
    with wrap(tmp_path / "model", nbytes, **options) as lm:
        assert lm.helper is not None and "95 % are assumed" in lm.explain()
        for seldom in (False, True) if ALL else (True,):
            if seldom:
                lm.helper.drafts_seen.add(2, 500)
            found = lm.generate(case.ids, **case.asked, eos_token_id=None)
            assert torch.equal(found, case.expected) and (lm.helper is None) is seldom
            assert lm.plan.budget.device == nbytes if seldom else lm.plan.budget.device < nbytes
    if not ALL:
        return
    with wrap(tmp_path / "model", nbytes, **options) as lm:
        assert lm.helper is None and "would not pay" in lm.explain() and "were checked" in lm.explain()


def test_formats_that_are_none_and_weights_that_are_packed_are_refused(llama_checkpoint: Any, tmp_path: Path) -> None:
    for name, says in (("w3", "no weight format 'w3'"), ("w4g7", "no weight format 'w4g7'")):
        with pytest.raises(CheckpointError, match=says):
            wrap(llama_checkpoint.folder, llama_checkpoint.share(2), draft=name)
    with pytest.raises(CheckpointError, match="no model at"):
        wrap(llama_checkpoint.folder, llama_checkpoint.share(2), draft=Path("w4"))  # a path is no format
    quantize_model(llama_checkpoint.folder, tmp_path / "w8", Wish("w8"))
    with pytest.raises(CheckpointError, match="packed weights, of which no w4g64 copy"):
        wrap(tmp_path / "w8", llama_checkpoint.share(2), draft="w4")
    model = transformers.AutoModelForCausalLM.from_config(llama(1))
    with pytest.raises(CheckpointError, match="save_pretrained"):
        wrap(model, llama_checkpoint.share(2), draft="w4")
    assert model.get_input_embeddings().weight.numel(), "refused, it is as it was"


def test_another_vocabulary_is_refused(llama_checkpoint: Any, tmp_path: Path) -> None:
    transformers.AutoModelForCausalLM.from_config(llama(1, vocab_size=64)).save_pretrained(tmp_path)
    with pytest.raises(PlanError, match="draft: it has 64 tokens in its vocabulary, the model 997"):
        wrap(llama_checkpoint.folder, llama_checkpoint.share(2), draft=tmp_path)


def test_the_commands_say_what_drafts(llama_checkpoint: Any) -> None:
    model, budget = str(llama_checkpoint.folder), f"device={llama_checkpoint.share(3.5)}"
    plan = ["plan", model, "--budget", budget, "--draft"]
    found = CliRunner().invoke(app, [*plan, model])
    assert found.exit_code == 0 and "draft       none, for it would not pay" in found.stdout
    for asked, says in (([*plan, model, "--json"], "--json is for"), ([*plan, "/nowhere"], "no model at /nowhere"),
                        (["run", "--save-plan", "p", model, "--prompts", "x", "--output", "y", "--draft", model],
                         "a plan is of one model"), (["serve", model, "--draft", model], "--budget")):
        found = CliRunner().invoke(app, asked)
        assert found.exit_code == 2 and says in " ".join(found.stderr.split())
