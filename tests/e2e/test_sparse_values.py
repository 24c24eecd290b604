"""Decode steps that read the values of a share of the tokens: the answers are those of transformers with an attention
that does, wherever caches lie and whoever attends; what cannot be so is refused."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from budgets import operators_nbytes
from families import gemma2, gpt2, llama, opt
from opened import open_rewritten
from selection import at_length
from transformers.modeling_utils import AttentionInterface

import forebay
from forebay.kernels.attention.attention_q.operator import ATTENTION_Q
from forebay.kernels.attention.sparse_attention.operator import SPARSE_ATTENTION
from forebay.kernels.operators import ATTENTION
from forebay.language_model import LanguageModel
from forebay.rewriter.ir.plan import Budget, PlanError, Workload, plan_from_dict
from forebay.rewriter.ir.program import ATTEND, Launch
from forebay.rewriter.planning.options import Options

SHARE, COUNT, PROMPT, NEW, HOST_NBYTES = 0.2, 4, 23, 8, 1 << 24
CONFIGS = {"llama": llama, "opt": opt, "gpt2": lambda: gpt2(initializer_range=0.2), "gemma2": gemma2}
DISK = {"cache_tier": "disk", "cache_tokens": 4, "micro_batches": 2}
HOST = DISK | {"cache_tier": "host"}


def attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
    scaling: float, softcap: float | None = None, **others: Any,
) -> tuple[torch.Tensor, None]:
    """For transformers: attention by its parts, of which a single query keeps few weights."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT * scaling
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask[..., : key.shape[2]]
    weights = scores.softmax(-1)
    if query.shape[2] == 1:
        for row in weights.view(-1, weights.shape[-1]):
            seen = (row > 0).nonzero().flatten()
            others_seen = seen[:-1]
            count = math.ceil(SHARE * len(others_seen))
            dropped = others_seen[row[others_seen].argsort(descending=True, stable=True)[count:]]
            row[dropped] = 0
    return (weights @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("few_values", attend)
transformers.AttentionMaskInterface.register("few_values", transformers.masking_utils.eager_mask)


class Case:
    """A random model whose attention is far from even, prompts of unequal length, and transformers' answers."""

    def __init__(self, name: str, folder: Path) -> None:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
        model.save_pretrained(folder)
        self.opened, self.nbytes = open_rewritten(folder), sum(p.numel() * 4 for p in model.parameters())
        made = torch.Generator().manual_seed(1)
        self.prompts = [torch.randint(3, model.config.vocab_size, (n,), generator=made) for n in (PROMPT, 1, 9, 17)]
        self.dense = [self.alone(model, ids) for ids in self.prompts]
        model.set_attn_implementation("few_values")
        self.expected = [self.alone(model, ids) for ids in self.prompts]

    @staticmethod
    def alone(model: Any, ids: torch.Tensor) -> list[int]:
        with torch.no_grad():
            whole = model.generate(ids[None], attention_mask=torch.ones_like(ids)[None], do_sample=False,
                                   max_new_tokens=NEW, pad_token_id=0, eos_token_id=None)
        found: list[int] = whole[0, len(ids) :].tolist()
        return found

    def language_model(self, **options: Any) -> LanguageModel:
        workload, wanted = Workload(COUNT, PROMPT, NEW), Options(**{"sparse_values": SHARE} | options)
        nbytes = 4 * self.nbytes + operators_nbytes(self.opened, workload, wanted, HOST_NBYTES)
        return LanguageModel(*self.opened, Budget(nbytes, HOST_NBYTES), workload, wanted)

    def answers(self, lm: LanguageModel) -> list[list[int]]:
        ids, mask = torch.zeros(COUNT, PROMPT, dtype=torch.int64), torch.zeros(COUNT, PROMPT, dtype=torch.int64)
        for row, prompt in enumerate(self.prompts):
            ids[row, PROMPT - len(prompt) :], mask[row, PROMPT - len(prompt) :] = prompt, 1
        made = lm.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0,
                           eos_token_id=None)
        found: list[list[int]] = made[:, PROMPT:].tolist()
        return found


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    return functools.cache(lambda name: Case(name, tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize(("name", "options"), [
    at_length("llama", {}), ("llama", HOST | {"cpu_attention": True}), ("llama", DISK | {"order": "row"}),
    ("opt", {"admitted": 2}), at_length("opt", HOST), ("opt", DISK | {"checkpoints": (1, 2)}),
    at_length("gpt2", {}), ("gpt2", HOST | {"cpu_attention": True, "admitted": 2}), at_length("gemma2", {}),
    ("gemma2", DISK), at_length("gemma2", {"admitted": 2, "micro_batches": 2})])
def test_answers_are_those_of_transformers(
    cases: Callable[[str], Case], name: str, options: dict[str, Any]
) -> None:
    case = cases(name)
    assert case.expected != case.dense, "a share of the values gives other answers"
    with case.language_model(**options) as lm:
        assert case.answers(lm) == case.expected
        assert lm.plan.schedule.batching.sparsity.values == SHARE and "20 % of the tokens" in lm.explain()
        decode, prefill = (lm.steps.program(n) for n in (1, lm.plan.schedule.prefill_chunk))
        ops = {i.op: i.stream for i in decode.step if isinstance(i, Launch)}
        assert SPARSE_ATTENTION.name in ops and ATTENTION.name not in ops
        assert (ops[SPARSE_ATTENTION.name] == ATTEND) == options.get("cpu_attention", False)
        assert ATTENTION.name in {i.op for i in prefill.step if isinstance(i, Launch)}
        again = plan_from_dict(json.loads(lm.plan.to_json()))
    with LanguageModel(*case.opened, lm.budget, lm.plan.workload, Options(), plan=again) as lm:
        assert case.answers(lm) == case.expected


def test_packed_caches(cases: Callable[[str], Case]) -> None:
    """All of the values are those of a dense attention, wherever the rows lie; few give others."""
    case = cases("llama")
    found = {}
    for share in (1.0, 0.999, SHARE):
        for tier in ({}, HOST | {"cpu_attention": True, "cache_tokens": 64}):
            with case.language_model(cache="kv8", sparse_values=share, **tier) as lm:
                found[share, bool(tier)] = case.answers(lm)
                ops = {i.op for i in lm.steps.program(1).step if isinstance(i, Launch)}
                assert (SPARSE_ATTENTION.name in ops) == (share < 1) != (ATTENTION_Q.name in ops)
    assert found[1.0, False] == found[0.999, False] == found[1.0, True] == found[0.999, True]
    assert found[SHARE, False] == found[SHARE, True] != found[1.0, False]


def test_transformers_loop_reads_as_few(cases: Callable[[str], Case]) -> None:
    """Beams go through steps that give every position: these decode as the plan's own do."""
    case = cases("opt")
    with case.language_model() as lm:
        ids = case.prompts[0][None]
        one = lm.generate(ids, max_new_tokens=NEW, num_beams=2, num_return_sequences=2, pad_token_id=0,
                          eos_token_id=None)
        dense = case.language_model(sparse_values=1.0)
        with dense:
            other = dense.generate(ids, max_new_tokens=NEW, num_beams=2, num_return_sequences=2, pad_token_id=0,
                                   eos_token_id=None)
    assert one.tolist() != other.tolist()


@pytest.mark.parametrize(("options", "told"), [
    ({"sparse_values": 0}, "sparse_values must be a number above 0 and at most 1"),
    ({"sparse_values": "0.1"}, "sparse_values must be a number above 0 and at most 1"),
    ({"sparse_values": True}, "sparse_values must be a number above 0 and at most 1"),
    ({"sparse_values": 0.1, "prompt_lookup_num_tokens": 4}, "sparse_values: steps that check drafts"),
    ({"sparse_values": 0.1, "prefill_chunk": 1}, "sparse_values: a step over 1 token")])
def test_options_that_cannot_be_met_are_told(cases: Callable[[str], Case], options: dict[str, Any], told: str) -> None:
    folder = cases("llama").opened[1].folder
    with pytest.raises(PlanError, match=told):
        forebay.wrap(folder, "64MiB", **options)


def test_a_replayed_plan_has_its_own_share(cases: Callable[[str], Case]) -> None:
    case = cases("llama")
    with case.language_model() as lm:
        plan = lm.plan
    with pytest.raises(PlanError, match=r"sparse_values: the plan has 0.2, 0.5 is asked for"):
        forebay.wrap(case.opened[1].folder, {"device": "64MiB", "host": HOST_NBYTES}, plan=plan, sparse_values=0.5)
