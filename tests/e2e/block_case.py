"""A random model, prompts of unequal length, and transformers' answers, for blocks to be held to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from budgets import operators_nbytes
from e2e.agreement import assert_same_tokens
from families import gemma2, gpt2, llama, opt
from opened import open_rewritten

from forebay.language_model import LanguageModel
from forebay.rewriter.checkpoints.resolve import resolve_model
from forebay.rewriter.ir.plan import Budget, PlanError, Workload
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.planning.options import Options

CONFIGS = {"llama": lambda: llama(3, hidden_size=96, intermediate_size=256, vocab_size=997), "opt": opt, "gpt2": gpt2,
           "gemma2": gemma2}
COUNT, PROMPT, NEW = 5, 11, 6
CHUNKS = {"prefill_chunk": 6}
DISK = {"cache_tier": "disk", "cache_tokens": 4, "prefill_chunk": 6}
HOST = DISK | {"cache_tier": "host"}
SHARED = DISK | {"cache_shares": (0.3, 0.4)}
ATTENDED = HOST | {"cpu_attention": True}
HOST_NBYTES = 1 << 22


class Case:
    """A random model, or the packaged one (smollm2), five prompts of unequal length and transformers' answers."""

    def __init__(self, name: str, folder: Path, prompt: int = PROMPT, new: int = NEW) -> None:
        self.prompt, self.new = prompt, new
        torch.manual_seed(0)
        if name == "smollm2":
            folder = resolve_model("demo", dequantize=True)
            self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        else:
            self.model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
            self.model.save_pretrained(folder)
        config = self.model.config
        self.opened = open_rewritten(folder)
        self.ids = torch.randint(3, config.vocab_size, (COUNT, prompt), generator=torch.Generator().manual_seed(1))
        self.mask = torch.ones_like(self.ids)
        for row, short in enumerate((0, 4, 10, 7, 1)):
            self.mask[row, :short] = 0
        with torch.no_grad():
            self.expected = self.model.generate(self.ids, attention_mask=self.mask, max_new_tokens=new, do_sample=False,
                                                pad_token_id=0, eos_token_id=None)
        self.nbytes = sum(p.numel() * 4 for p in self.model.parameters())

    def language_model(self, device: int | float, machine: Machine | None = None, **options: Any) -> LanguageModel:
        """On so many bytes, or on such a share of the model's beside what operators take here, and, where caches lie in
        host memory or a GPU's copies pass through it, `HOST_NBYTES` of that, or an eighth of a large model's."""
        hosted = "host" in (options.get("cache_tier"), options.get("hidden_tier")) or (
            {"cache_shares", "hidden_shares"} & {*options}) or machine
        host = max(HOST_NBYTES, self.nbytes // 8) if hosted else 0
        workload = Workload(COUNT, self.prompt, self.new)
        wanted = Options(**{"cache_tier": "device"} | options)
        nbytes = device if isinstance(device, int) else int(device * self.nbytes) + (
            0 if machine else operators_nbytes(self.opened, workload, wanted, host))
        return LanguageModel(*self.opened, Budget(nbytes, host), workload, wanted, machine)

    def tight(self, **options: Any) -> LanguageModel:
        """On a budget hardly larger than the smallest."""
        with pytest.raises(PlanError) as refused:
            self.language_model(self.nbytes // 10, **options)
        found = re.search(r"the smallest that can is .*?\((\d+) bytes", str(refused.value))
        assert found
        return self.language_model(int(1.03 * int(found[1])), **options)

    def answer(self, lm: LanguageModel, **options: Any) -> torch.Tensor:
        return lm.generate(self.ids, attention_mask=self.mask, max_new_tokens=self.new, pad_token_id=0,
                           eos_token_id=None, **options)

    def check(self, lm: LanguageModel) -> None:
        ours = self.answer(lm)
        found = assert_same_tokens(ours, self.expected, self.mask, self.model, lm.next_logits)
        assert found.tokens >= COUNT * self.new - 3
