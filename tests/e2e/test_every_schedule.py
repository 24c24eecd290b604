"""Every order of micro-batches x tier of their caches x who attends x cache format x family, with sequences that enter
slots as others leave them, and every stream late at random: each answer is that of the prompt alone.

`make test` tries cells of small models that cover every pair of choices, `make test-all` all cells, of SmolLM2 too.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from budgets import operators_nbytes
from families import gemma2, gpt2, llama, opt
from late import make_late
from opened import open_rewritten
from selection import at_length

from forebay.language_model import LanguageModel
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.checkpoints.resolve import resolve_model
from forebay.rewriter.ir.plan import Budget, Workload
from forebay.rewriter.ir.program import ATTEND, Launch
from forebay.rewriter.planning.options import Options
from forebay.runtime.run.request import Request
from forebay.runtime.run.sampling import Sampling
from forebay.runtime.run.scheduler import answer_all

BATCH_SLOTS, ENTERING, MICRO_BATCHES, COUNT, PROMPT, NEW = 4, 2, 2, 7, 14, 6
HOST_NBYTES = 1 << 26
CONFIGS = {"llama": lambda: llama(3), "opt": lambda: opt(3), "gpt2": lambda: gpt2(3),  # a layer for each tier
           "gemma2": gemma2}
# where caches lie, and who attends over those in host memory
TIERS: dict[str, dict[str, Any]] = {
    "device": {"cache_tier": "device"}, "disk": {"cache_tier": "disk"}, "host": {"cache_tier": "host"},
    "mixed": {"cache_tier": "disk", "cache_shares": (0.4, 0.4)},
    "host, attended there": {"cache_tier": "host", "cpu_attention": True},
    "mixed, attended on the host": {"cache_tier": "disk", "cache_shares": (0.4, 0.4), "cpu_attention": True}}
CHOICES = (tuple(CONFIGS), tuple(TIERS), ("row", "zigzag"), ("native", "kv8"))
CELLS = [*itertools.product(*CHOICES), *(at_length(*cell) for cell in itertools.product(("smollm2",), *CHOICES[1:]))]


class Case:
    """A model, prompts of unequal length, answers of unequal length, and what transformers says to each alone."""

    def __init__(self, name: str, folder: Path) -> None:
        torch.manual_seed(0)
        if name == "smollm2":
            try:
                folder = resolve_model("demo", dequantize=True)
            except CheckpointError as error:
                pytest.skip(f"needs the packaged model: {error}")
            self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        else:
            self.model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
            self.model.save_pretrained(folder)
        self.opened = open_rewritten(folder)
        self.nbytes = sum(p.numel() * 4 for p in self.model.parameters())
        chance, made = random.Random(5), torch.Generator().manual_seed(1)
        lengths = [PROMPT, 1, *(chance.randint(2, PROMPT) for _ in range(COUNT - 2))]
        self.prompts = [torch.randint(3, self.model.config.vocab_size, (n,), generator=made) for n in lengths]
        self.wanted = [1, NEW, *(chance.randint(2, NEW) for _ in range(COUNT - 2))]
        self.alone = functools.cache(self._alone)

    def language_model(self, batch_slots: int, cache: str, **options: Any) -> LanguageModel:
        """On a budget of a bit less than the weights of a large model; a small one needs more than its weights."""
        workload, wanted = Workload(batch_slots, PROMPT, NEW), Options(cache=cache, **options)
        most = int(0.9 * self.nbytes) if self.nbytes > 1 << 28 else (
            4 * self.nbytes + operators_nbytes(self.opened, workload, wanted, HOST_NBYTES))
        return LanguageModel(*self.opened, Budget(most, HOST_NBYTES), workload, wanted)

    def answers(self, lm: LanguageModel) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        asked = [Request(ids, wanted) for ids, wanted in zip(self.prompts, self.wanted, strict=True)]
        answer_all(lm.session, asked, Sampling(), on_end=lambda number, tokens: found.update({number: tokens}))
        return [found[i] for i in range(COUNT)]

    def _alone(self, cache: str) -> list[list[int]]:
        """Transformers' answers; of a packed cache, which has no other reference, those of one place on the device."""
        if cache != "native":
            with self.language_model(1, cache, cache_tier="device") as lm:
                return self.answers(lm)
        found = []
        for ids, wanted in zip(self.prompts, self.wanted, strict=True):
            with torch.no_grad():
                whole = self.model.generate(ids[None], attention_mask=torch.ones_like(ids)[None], do_sample=False,
                                            max_new_tokens=wanted, pad_token_id=0, eos_token_id=None)
            found.append(whole[0, len(ids) :].tolist())
        return found

    def margin(self, i: int, tokens: list[int]) -> float:
        """By how much transformers finds its next token likelier than any other, behind these of an answer."""
        ids = torch.cat((self.prompts[i], torch.tensor(tokens, dtype=torch.int64)))
        with torch.no_grad():
            best = self.model(ids[None]).logits[0, -1].topk(2).values
        return float(best[0] - best[1])


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    return functools.cache(lambda name: Case(name, tmp_path_factory.mktemp(name)))


@pytest.mark.covering(2)
@pytest.mark.parametrize(("name", "tier", "order", "cache"), CELLS)
def test_answers_are_those_of_each_prompt_alone(
    cases: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch, name: str, tier: str, order: Any, cache: str
) -> None:
    """More sequences than slots, which end at different steps."""
    case = cases(name)
    expected = case.alone(cache)
    monkeypatch.setenv("FOREBAY_POISON", "1")
    make_late(monkeypatch)
    staging = {} if tier == "device" else {"cache_tokens": 8 if name == "smollm2" else 4}
    with case.language_model(BATCH_SLOTS, cache, order=order, micro_batches=MICRO_BATCHES, admitted=ENTERING,
                             prefill_chunk=6, **TIERS[tier], **staging) as lm:
        batching = lm.plan.schedule.batching
        homes = {home for of_layer in batching.cache_homes(len(case.opened[0].states)) for home in of_layer}
        assert homes == ({tier.partition(",")[0]} if "mixed" not in tier else {"device", "host", "disk"})
        assert (batching.micro_batches.count, batching.micro_batches.order,
                batching.admitted) == (MICRO_BATCHES, order, ENTERING)
        step = lm.steps.program(1).step
        assert any(isinstance(i, Launch) and i.stream == ATTEND for i in step) == ("attended" in tier)
        for i, (ours, theirs) in enumerate(zip(case.answers(lm), expected, strict=True)):
            assert len(ours) == len(theirs)
            parts = next((t for t in range(len(ours)) if ours[t] != theirs[t]), None)
            assert parts is None or case.margin(i, theirs[:parts]) < 1e-3, (i, ours, theirs)
