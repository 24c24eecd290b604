"""SmolLM2, real weights, on two and four ranks: transformers' own greedy tokens, whichever way they share it."""

from __future__ import annotations

import pytest
import torch
import transformers as T
from on_ranks import Nursery

import forebay
from forebay.rewriter.checkpoints.resolve import demo_checkpoint

PROMPT, NEW = "The capital of France is", 8


def answer(folder: str, ids: list[list[int]], mesh: str, budget: str) -> list[list[int]]:
    with forebay.wrap(folder, budget, batch=1, prompt=8, new_tokens=NEW, mesh=mesh) as lm:
        return lm.generate(torch.tensor(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None).tolist()  # type: ignore[no-any-return]


@pytest.mark.all
def test_ranks_give_transformers_tokens() -> None:
    folder = str(demo_checkpoint())
    ids = T.AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt").input_ids
    model = T.AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
    expected = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None).tolist()
    nursery = Nursery()
    try:
        for ranks, mesh, budget in ((2, "2", "1GB"), (2, "2", "250MB"), (2, "stages=2", "1GB"),
                                    (2, "tensor=2,attention=batch", "1GB"), (2, "tensor=2,attention=batch", "250MB"),
                                    (2, "tensor=2,layout=xyz", "1GB"), (4, "tensor=2x2,layout=x", "600MB"),
                                    (4, "tensor=2x2,layout=2d", "600MB"), (4, "tensor=2x2,layout=2d", "180MB")):
            found = nursery.on_ranks(ranks, answer, folder, ids.tolist(), mesh, budget, traced=[(folder, mesh)])
            assert found == [expected] * ranks, (mesh, budget)
    finally:
        nursery.close()
