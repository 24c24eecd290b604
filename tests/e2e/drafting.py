"""What tests of drafts share: one of the ways to draft left out, and a model for which drafts are predicted to pay."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from families import llama

from forebay.rewriter.ir.plan import PlanError
from forebay.rewriter.machine.profile import Machine


def refused(*_: object) -> NoReturn:
    """In the place of `draft_apart` or `draft_beside`: there is none of this kind."""
    raise PlanError("none by itself")


class Paying:
    """A random model in `folder`, a budget of six tenths of it, and its answer to `ids`; times are a guess's."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            llama(6, hidden_size=128, intermediate_size=384, vocab_size=997)).eval()
        model.save_pretrained(folder)
        self.folder, self.nbytes = folder, int(0.6 * sum(p.nbytes for p in model.parameters())) + 300_000
        self.options: Any = dict(prompt=10, new_tokens=16, machine=Machine.default(), draft="w8")
        self.ids, self.asked = torch.tensor([[3, 1, 4, 1, 5]]), dict(max_new_tokens=16, do_sample=False)
        with torch.no_grad():
            self.expected = model.generate(self.ids, **self.asked, pad_token_id=0, eos_token_id=None)
