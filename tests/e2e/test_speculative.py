"""Answers whose drafts are checked equal plain ones: families, packed weights and caches, streamed, in batches."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES
from opened import open_rewritten
from selection import ALL, at_length

from forebay.api import wrap
from forebay.kernels.logits.sampling.operator import SAMPLING
from forebay.language_model import LanguageModel
from forebay.rewriter.checkpoints.quantize import Wish, quantize_model
from forebay.rewriter.ir.plan import Budget, Workload, plan_from_dict
from forebay.rewriter.planning.options import Options
from forebay.runtime.run import token_sampler
from forebay.runtime.run.drafts import PromptLookup
from forebay.runtime.run.generation import Stop, generate_tokens
from forebay.runtime.run.model_drafts import ModelDrafter
from forebay.runtime.run.progress import WorkDone
from forebay.runtime.run.request import Request
from forebay.runtime.run.sampling import Sampling, choose
from forebay.runtime.run.scheduler import answer_all

NEW = 40 if ALL else 24
PROMPTS = [torch.tensor(ids) for ids in ([5, 6, 7, 8, 9] * 4, [11, 12, 13], [3, 4, 5, 6, 3, 4, 5], [9])]


@pytest.fixture(scope="module")
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A family's checkpoint, as it is and in packed rows."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp(request.param)
    transformers.AutoModelForCausalLM.from_config(FAMILIES[request.param](3)).eval().save_pretrained(folder)
    packed = tmp_path_factory.mktemp("packed") / "w4"
    quantize_model(folder, packed, Wish("w4g32"))
    return {"native": folder, "w4": packed}


def language_model(folder: Path, options: Options) -> LanguageModel:
    """Planned for a little more than what every plan with such steps takes."""
    opened, work = open_rewritten(folder), Workload(4, 20, NEW)
    with LanguageModel(*opened, Budget(1 << 25), work, options) as whole:
        least = whole.steps.pipeline.smallest_budget(options)
    return LanguageModel(*opened, Budget(least + (16 << 10)), work, options)


GAP_SHARE = 1e-3  # of logits that are mostly below 1: those of one token were seen to differ by 1e-4
KINDS = [(weights, cache) for weights in ("native", "w4") for cache in ("native", "kv8")]
SOME = {"llama": [KINDS[0], KINDS[3]], "opt": [("w4", "native")], "gpt2": [("native", "kv8")],
        "gemma2": [("w4", "kv8")]}


@pytest.mark.parametrize(("folders", "weights", "cache"), [
    (family, *kind) for family in (FAMILIES if ALL else SOME) for kind in (KINDS if ALL else SOME[family])],
    indirect=["folders"])
def test_tokens_equal_plain_ones(folders: dict[str, Path], weights: str, cache: str) -> None:
    """All families with all kinds under FOREBAY_TEST_ALL=1, each kind with some always."""
    options = Options(prompt_lookup_num_tokens=7, cache=cache, cache_tier="device", prefill_chunk=5)
    with language_model(folders[weights], options) as lm:
        assert lm.plan.schedule.speculative_steps == (8, 4, 2) and lm.plan.prediction.streamed_nbytes > 0
        with lm.running(4, 20, NEW) as session:
            for count in (1, 2, 3, 4) if ALL else (1, 4):
                prompts = PROMPTS[:count]
                free = generate_tokens(session, prompts, Sampling(), Stop(NEW))
                eos = frozenset(free[:, [NEW // 3, NEW // 2]].flatten().tolist())  # falls within passes
                for stop in (Stop(NEW), Stop(NEW, eos)):
                    plain = generate_tokens(session, prompts, Sampling(), stop)
                    tally = WorkDone()
                    found = generate_tokens(session, prompts, Sampling(), stop, None, None, PromptLookup(),
                                                   tally)
                    assert torch.equal(found, plain)
                    assert tally.decodes < plain.shape[1] or not tally.accepted
        program = lm.steps.program(8)  # proved when it was made
        assert program.outputs["out0"].shape[:2] == (4, 8)


@pytest.mark.parametrize(("folders", "weights", "cache"), [
    (family, *kind) for family in (FAMILIES if ALL else ("llama",)) for kind in (KINDS if ALL else KINDS[1:2])],
    indirect=["folders"])
def test_a_models_drafts_change_no_token(folders: dict[str, Path], weights: str, cache: str) -> None:
    """Drafts of the same weights in fewer bits: many are right, others are taken back, from both caches. All families
    under FOREBAY_TEST_ALL=1."""
    options = Options(prompt_lookup_num_tokens=7, cache=cache, cache_tier="device", prefill_chunk=5)
    with (language_model(folders[weights], options) as lm,
          language_model(folders["w4"], Options(cache_tier="device")) as helper,
          lm.running(4, 20, NEW) as session, helper.running(4, 21, NEW) as drafting):
        for count in (1, 2, 3, 4) if ALL else (4,):
            prompts = PROMPTS[:count]
            free = generate_tokens(session, prompts, Sampling(), Stop(NEW))
            eos = frozenset(free[:, [NEW // 3, NEW // 2]].flatten().tolist())
            for stop in (Stop(NEW), Stop(NEW, eos)):
                plain, tally = generate_tokens(session, prompts, Sampling(), stop), WorkDone()
                drafter = ModelDrafter(drafting, Sampling(), [None] * count)
                drafter.token_time_s = 0.0  # whatever is predicted, draft
                found = generate_tokens(session, prompts, Sampling(), stop, None, None, drafter, tally)
                assert torch.equal(found, plain)
                at_once = plain.shape[1] == 1  # a random model may repeat one token, which then ends the answer
                assert at_once or (tally.accepted if stop.eos else tally.accepted > tally.offered / 4)


def parts_near(found: list[int], alone: list[int], logits: list[torch.Tensor], sampling: Sampling, seed: int) -> bool:
    """Whether the first token that differs is drawn too where some logit [1, V] is larger by `GAP_SHARE`."""
    at = next((i for i, (a, b) in enumerate(zip(found, alone, strict=False)) if a != b), None)
    if at is None:
        return False
    generator = torch.Generator().manual_seed(seed)
    uniform = [torch.rand(1, generator=generator) for _ in range(at + 1)][-1]
    raised = logits[at] + GAP_SHARE * torch.eye(logits[at].shape[-1])
    return found[at] in SAMPLING.overload(raised, uniform.expand(len(raised)).contiguous(), sampling.temperature,
                                          sampling.top_k, sampling.top_p).tolist()


@pytest.mark.parametrize(("folders", "weights", "cache"), [
    (family, *kind) for family in (FAMILIES if ALL else ("llama",)) for kind in (KINDS if ALL else KINDS[3:])],
    indirect=["folders"])
@pytest.mark.parametrize(("admitted", "drafts"), [at_length(0, False), (0, True), (2, False), at_length(2, True)])
def test_sequences_in_places_check_drafts(
    folders: dict[str, Path], weights: str, cache: str, admitted: int, drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was looked up or what the model's weights in fewer bits say. More of them than slots, which they enter
    together or one after the other, of unequal lengths; some are drawn, and some end in the middle of a pass. All
    families under FOREBAY_TEST_ALL=1. With a cache in 8 bits, into which sums in another order may round otherwise,
    what is drawn may part where a logit is near another."""
    chosen: list[torch.Tensor] = []
    monkeypatch.setattr(token_sampler, "choose", lambda logits, *how: (chosen.append(logits.clone()), choose(
        logits, *how))[1])
    options = Options(prompt_lookup_num_tokens=7, cache=cache, cache_tier="device", prefill_chunk=5,
                    admitted=admitted or None)
    samplings = [Sampling(), Sampling(True, 1.2, 5, 0.9)]
    with (language_model(folders[weights], options) as lm, lm.running(4, 20, NEW, continuous=True) as session,
          language_model(folders["w4"], Options(cache_tier="device", admitted=admitted or None)) as helper,
          helper.running(4, 21, NEW, continuous=True) as other):
        assert lm.plan.schedule.batching.admitted == helper.plan.schedule.batching.admitted == admitted
        asked = [Request(ids, NEW - 3 * i, lambda i=i: torch.Generator().manual_seed(i), samplings[i % 3 == 2])
                 for i, ids in enumerate([*PROMPTS, *PROMPTS[:2]])]
        with language_model(folders[weights], replace(options, admitted=None)) as plain, plain.running(
                4, 20, NEW) as apart:
            free = generate_tokens(apart, [asked[0].ids], Sampling(), Stop(NEW))
            eos = frozenset(free[:, NEW // 2].tolist())
            alone, seen = [], []
            for i, each in enumerate(asked):
                chosen.clear()
                alone.append(generate_tokens(apart, [each.ids], each.sampling or Sampling(), Stop(
                    each.new_tokens, eos), [torch.Generator().manual_seed(i)])[0].tolist())
                seen.append(list(chosen))
        found: dict[int, list[int]] = {}
        drafter = ModelDrafter(other, Sampling())
        drafter.token_time_s = 0.0  # whatever is predicted, draft
        work = answer_all(session, asked, Sampling(), eos, on_end=found.__setitem__,
                          drafter=drafter if drafts else None)
        for i, (each, expected) in enumerate(zip(asked, alone, strict=True)):
            assert found[i] == expected or (cache == "kv8" and each.sampling.do_sample and parts_near(
                found[i], expected, seen[i], each.sampling, i))
        assert work.offered and work.tokens == sum(map(len, found.values()))


def test_a_wrapped_assistant_drafts_for_the_plans_steps(llama_checkpoint: Any) -> None:
    """Through `generate`: several prompts, greedy answers are transformers', drawn ones repeat under their seeds."""
    ids, options = llama_checkpoint.ids, dict(max_new_tokens=24, pad_token_id=0, eos_token_id=None)
    with torch.no_grad():
        expected = llama_checkpoint.model.generate(ids, do_sample=False, **options)
    with wrap(llama_checkpoint.folder, llama_checkpoint.share(0.8), batch=3, prompt=10, new_tokens=24,
              prompt_lookup_num_tokens=7) as lm, wrap(
            llama_checkpoint.folder, llama_checkpoint.share(3.0), prompt=4) as helper:
        ours = lm.generate(ids, do_sample=False, assistant_model=helper, **options)
        assert torch.equal(ours, expected)
        drawn = []
        for _ in range(2):
            draws = [torch.Generator().manual_seed(i) for i in range(3)]
            drawn.append(lm.generate(ids, do_sample=True, top_k=5, assistant_model=helper, generator=draws, **options))
        assert torch.equal(*drawn) and lm.tally.accepted == lm.tally.offered > 0  # of equal weights none is refused


def test_generate_checks_drafts_where_the_plan_does(llama_checkpoint: Any) -> None:
    ids, model = llama_checkpoint.ids, llama_checkpoint.model
    with torch.no_grad():
        expected = model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0, eos_token_id=None)
    drawn = []
    for drafted in (7, None):
        with wrap(llama_checkpoint.folder, llama_checkpoint.share(0.8), batch=3, prompt=10, new_tokens=24,
                  prompt_lookup_num_tokens=drafted) as lm:
            assert ("checked by steps over 8, 4, 2" in lm.explain()) is bool(lm.plan.schedule.speculative_steps)
            for more in ({}, {"prompt_lookup_num_tokens": 3}) if drafted else ({},):
                ours = lm.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0, eos_token_id=None, **more)
                assert torch.equal(ours, expected) and lm.tally.tokens == 3 * 24
            # one generator for three: each column is one draw, so none is drafted
            for draws in ([torch.Generator().manual_seed(i) for i in range(3)], torch.Generator().manual_seed(7)):
                drawn.append(lm.generate(ids, max_new_tokens=24, do_sample=True, top_k=5, pad_token_id=0,
                                         eos_token_id=None, generator=draws))
                assert bool(lm.tally.steps) is (drafted is not None and isinstance(draws, list))
    assert torch.equal(drawn[0], drawn[2]) and torch.equal(drawn[1], drawn[3])


def test_calls_too_short_for_drafts_are_answered(llama_checkpoint: Any) -> None:
    """And plans made for them leave longer ones their drafts, of several prompts too."""
    ids, model = llama_checkpoint.ids, llama_checkpoint.model
    with wrap(llama_checkpoint.folder, llama_checkpoint.share(0.8), prompt=4, new_tokens=8,
              prompt_lookup_num_tokens=7) as lm:
        for count, new, drafts in ((3, 1, False), (1, 1, False), (3, 24, True)):
            options = dict(max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=None)
            with torch.no_grad():
                expected = model.generate(ids[:count], **options)
            assert torch.equal(lm.generate(ids[:count], prompt_lookup_num_tokens=3, **options), expected)
            assert bool(lm.plan.schedule.speculative_steps) is drafts is bool(lm.tally.steps)


def test_a_saved_plan_checks_drafts_again(llama_checkpoint: Any, tmp_path: Path) -> None:
    with wrap(llama_checkpoint.folder, llama_checkpoint.share(0.8), prompt=10, new_tokens=24,
              prompt_lookup_num_tokens=7) as lm:
        lm.plan.save(tmp_path / "plan.json")
    plan = plan_from_dict(json.loads((tmp_path / "plan.json").read_text()))
    with wrap(llama_checkpoint.folder, llama_checkpoint.share(0.8), plan=plan) as again:
        assert again.plan.schedule.speculative_steps == (8, 4, 2)
        again.generate(llama_checkpoint.ids[:1], max_new_tokens=20, eos_token_id=None, do_sample=False)
        assert again.tally.steps
