"""Decode steps that read some blocks of a staged cache: answers are those of transformers with an attention that sees
these blocks alone, all blocks give the bits of exact attention, and what cannot be so is refused."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from budgets import operators_nbytes
from families import llama, opt
from opened import open_rewritten
from selection import at_length
from transformers.modeling_utils import AttentionInterface

import forebay
from forebay.kernels.formats.key_means import chosen_count
from forebay.kernels.operators import CHOOSE_BLOCKS, MEAN_KEYS
from forebay.language_model import LanguageModel
from forebay.rewriter.ir.plan import Budget, PlanError, Workload, plan_from_dict
from forebay.rewriter.ir.program import Launch
from forebay.rewriter.planning.options import Options
from forebay.runtime.run.step_inputs import StepInputs

SHARE, TOKENS, COUNT, PROMPT, NEW, HOST_NBYTES = 0.3, 8, 4, 76, 12, 1 << 24
CONFIGS = {"llama": lambda: llama(initializer_range=0.3), "opt": lambda: opt(init_std=0.3)}
DISK = {"cache_tier": "disk", "cache_tokens": TOKENS, "micro_batches": 2}


def seen_blocks(q: np.ndarray, keys: np.ndarray, scale: float) -> np.ndarray:
    """Whether the query q [H, D] of the last token sees each of keys [Hkv, n, D]: [n]."""
    full = (keys.shape[1] - 1) // TOKENS
    weights = np.zeros(full)
    for h, query in enumerate(q):
        means = keys[h * len(keys) // len(q), : full * TOKENS].reshape(full, -1, 8, keys.shape[2]).mean(2)
        masses = np.exp(scale * (means @ query)).sum(1)
        weights += masses / masses.sum()
    weights[[0, -1][: min(full, 2)]] = math.inf
    count = min(full, max(2, math.ceil(SHARE * full)))
    seen = np.zeros(keys.shape[1], dtype=bool)
    seen[full * TOKENS :] = True
    for block in weights.argsort()[::-1][:count]:
        seen[block * TOKENS : (block + 1) * TOKENS] = True
    return seen


def attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float, **others: Any
) -> tuple[torch.Tensor, None]:
    """For transformers: attention of one sequence, of which a single query sees some blocks."""
    group, n = query.shape[1] // key.shape[1], key.shape[2]
    seen = torch.ones(query.shape[2], n, dtype=torch.bool).tril(n - query.shape[2])
    if query.shape[2] == 1 and n > TOKENS:
        seen &= torch.from_numpy(seen_blocks(query[0, :, 0].double().numpy(), key[0].double().numpy(), scaling))
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1), seen, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("some_blocks", attend)
transformers.AttentionMaskInterface.register("some_blocks", lambda *args, **others: None)


class Case:
    """A random model whose attention is far from even, prompts of unequal length, and transformers' answers."""

    def __init__(self, name: str, folder: Path) -> None:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
        model.save_pretrained(folder)
        self.opened, self.nbytes = open_rewritten(folder), sum(p.numel() * 4 for p in model.parameters())
        made = torch.Generator().manual_seed(1)
        self.prompts = [torch.randint(3, model.config.vocab_size, (n,), generator=made) for n in (PROMPT, 5, 49, 64)]
        self.dense = [self.alone(model, ids) for ids in self.prompts]
        model.set_attn_implementation("some_blocks")
        self.expected = [self.alone(model, ids) for ids in self.prompts]

    @staticmethod
    def alone(model: Any, ids: torch.Tensor) -> list[int]:
        with torch.no_grad():
            whole = model.generate(ids[None], attention_mask=torch.ones_like(ids)[None], do_sample=False,
                                   max_new_tokens=NEW, pad_token_id=0, eos_token_id=None)
        found: list[int] = whole[0, len(ids) :].tolist()
        return found

    def language_model(self, **options: Any) -> LanguageModel:
        workload, wanted = Workload(COUNT, PROMPT, NEW), Options(**{"kv_blocks": SHARE} | options)
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
    ("llama", DISK), at_length("llama", DISK | {"order": "row"}), at_length("llama", DISK | {"cache_tier": "host"}),
    at_length("llama", DISK | {"prefill_chunk": 16, "cache_slots": 1}), ("opt", DISK | {"cache_tier": "host"}),
    at_length("opt", {"cache_tokens": TOKENS})])
def test_answers_are_those_of_transformers(
    cases: Callable[[str], Case], name: str, options: dict[str, Any]
) -> None:
    case = cases(name)
    assert case.expected != case.dense, "some blocks give other answers"
    with case.language_model(**options) as lm:
        assert case.answers(lm) == case.expected
        assert lm.plan.schedule.batching.sparsity.blocks == SHARE and "30 % of the cache's blocks" in lm.explain()
        found = {tokens: {i.op for i in lm.steps.program(tokens).step if isinstance(i, Launch)}
                 for tokens in (1, lm.plan.schedule.prefill_chunk)}
        assert all((CHOOSE_BLOCKS.name in ops) == (tokens == 1) and MEAN_KEYS.name in ops
                   for tokens, ops in found.items())
        again = plan_from_dict(json.loads(lm.plan.to_json()))
    with LanguageModel(*case.opened, lm.budget, lm.plan.workload, Options(), plan=again) as lm:
        assert case.answers(lm) == case.expected


def logits(lm: LanguageModel, turns: list[int], ids: torch.Tensor) -> torch.Tensor:
    """The logits of prompts in one step, and of steps over one token of ids [B, n] at these positions, then one less
    for each next sequence."""
    lengths, session = torch.arange(COUNT), lm.session
    steps = [StepInputs(ids[:, :PROMPT], lengths * 0, torch.full((COUNT,), PROMPT - 1))]
    steps += [StepInputs(ids.gather(1, start[:, None]), start, lengths * 0)
              for position in turns for start in [position - lengths]]
    return torch.stack([session.step(step).clone() for step in steps])


def test_all_blocks_are_exact_wherever_a_step_goes_back(cases: Callable[[str], Case]) -> None:
    """Steps go on, back into blocks that are full, to their first token and over their ends. Where a step goes back the
    same blocks are chosen, though others were computed since."""
    case = cases("llama")
    ids = torch.randint(3, 100, (COUNT, PROMPT + NEW), generator=torch.Generator().manual_seed(2))
    turns, back = [*range(PROMPT, PROMPT + 9), *range(51, 60), 19, 20], [*range(51, 58), 20]
    found = {}
    for share in (1.0, 0.999, SHARE):
        with case.language_model(kv_blocks=share, prefill_chunk=PROMPT, **DISK) as lm:
            found[share] = logits(lm, turns, ids)
            if share == SHARE:
                again = logits(lm, back, ids)
                with case.language_model(prefill_chunk=PROMPT, **DISK) as other:
                    assert torch.equal(again, logits(other, back, ids))
    assert torch.equal(found[1.0], found[0.999])
    assert torch.equal(found[1.0][0], found[SHARE][0]), "prompts are exact"
    assert not torch.equal(found[1.0][1], found[SHARE][1])


def test_a_step_reads_the_bytes_of_its_blocks(cases: Callable[[str], Case]) -> None:
    case = cases("llama")
    with case.language_model(prefill_chunk=PROMPT, **DISK) as lm:
        lm.start_trace()
        ids = torch.ones(COUNT, PROMPT + NEW, dtype=torch.int64)
        logits(lm, [], ids)
        assert lm.trace is not None
        before = lm.trace.link_nbytes()["disk", "device"]
        turns = [PROMPT, PROMPT + 1, PROMPT + 2]
        steps = [StepInputs(ids[:, :1], torch.full((COUNT,), at), torch.zeros(COUNT, dtype=torch.int64))
                 for at in turns]
        for step in steps:
            lm.session.step(step)
        lm.session.device.finish()
        read = lm.trace.link_nbytes()["disk", "device"] - before
        assert not any(w.tier == "disk" for w in lm.plan.weights if not w.gather), "nothing else is read"
        homes = [b for b in lm.plan.buffers if b.kind == "cache" and b.arena == "cache"]
        block = homes[0].nbytes // COUNT // ((PROMPT + NEW) // TOKENS + 1)
        assert read == len(homes) * COUNT * block * sum(chosen_count(SHARE, at // TOKENS) for at in turns)


@pytest.mark.parametrize(("options", "told"), [
    ({"kv_blocks": 0}, "kv_blocks must be a number above 0 and at most 1"),
    ({"kv_blocks": True}, "kv_blocks must be a number above 0 and at most 1"),
    ({"prompt_lookup_num_tokens": 4}, "kv_blocks: steps that check drafts read all blocks"),
    ({"prefill_chunk": 1}, "kv_blocks: a step over 1 token reads few blocks"),
    ({"cache_tier": "device"}, "kv_blocks: the device's cache is read whole; leave cache_tier out"),
    ({"cache": "kv8"}, "kv_blocks: keys of packed rows have no means; leave cache out"),
    ({"cache_shares": (0.5, 0.0)}, "kv_blocks: blocks are chosen of all layers; leave cache_shares out"),
    ({"checkpoints": (1, 2)}, "kv_blocks: they are read whole; leave checkpoints out"),
    ({"batch_slots": 2}, "kv_blocks: all sequences begin together; leave batch_slots out"),
    ({"prefix_cache": "1MB"}, "kv_blocks: a kept prompt has no means of keys; leave prefix_cache out"),
    ({"cpu_attention": True, "cache_tier": "host"}, "kv_blocks: the CPU attends to all of the cache"),
    ({"cache_tier": "disk", "cache_tokens": 12}, "kv_blocks: blocks of 12 tokens hold no whole means")])
def test_options_that_cannot_be_met_are_told(cases: Callable[[str], Case], options: dict[str, Any], told: str) -> None:
    folder = cases("llama").opened[1].folder
    with pytest.raises(PlanError, match=told):
        forebay.wrap(folder, "64MiB", **{"kv_blocks": 0.1} | options)


def test_a_replayed_plan_has_its_own_share(cases: Callable[[str], Case]) -> None:
    case = cases("llama")
    with case.language_model(**DISK) as lm:
        plan = lm.plan
    with pytest.raises(PlanError, match=r"kv_blocks: the plan has 0.3, 0.5 is asked for"):
        forebay.wrap(case.opened[1].folder, {"device": "64MiB", "host": HOST_NBYTES}, plan=plan, kv_blocks=0.5)
