"""Which shape of drafts would give how many tokens a pass: `python -m benchmarks.draft_shapes`.

SmolLM2 continues texts greedily, in float32; a copy of it in 4 bits (w4g64), whose head and embeddings have 8, says
what it predicts after each prefix of these answers. The rank of the model's own token among those of the copy is
recorded. From that follows what a pass would give, walking the answers: with a chain of the most likely tokens,
and with the best tree of as many tokens (each node's chance is the product of the shares of its ranks; the likeliest
nodes are taken, as by Sequoia's dynamic program where ranks are alike at every node). No time is measured.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.perplexity import rounded
from benchmarks.speculative import REPEATING, TEXTS
from forebay.commands.prompts import load_tokenizer
from forebay.rewriter.checkpoints.resolve import demo_checkpoint

MORE = {
    "letter": "Dear Professor Lindqvist,\n\nI am writing to ask whether",
    "recipe": "A simple soup for cold evenings. You need four carrots, two onions and",
    "history": "The printing press changed Europe in the fifteenth century because",
    "question": "Question: Why is the sky blue?\nAnswer:"}
RANKS = 4  # most likely tokens of a draft that a tree may branch into
NODES = (3, 7, 15)  # tokens that a step checks beside the one that is known

Ranks = tuple[int, ...]


def best_tree(shares: Sequence[float], nodes: int, deepest: int) -> set[Ranks]:
    """The likeliest nodes, as ranks from the root on."""
    found: set[Ranks] = set()
    open_ = [(-share, (rank,)) for rank, share in enumerate(shares)]
    heapq.heapify(open_)
    while open_ and len(found) < nodes:
        chance, path = heapq.heappop(open_)
        found.add(path)
        if len(path) < deepest:
            for rank, share in enumerate(shares):
                heapq.heappush(open_, (chance * share, (*path, rank)))
    return found


def passes(ranks: Sequence[int], tree: Collection[Ranks]) -> int:
    """Passes over the weights for an answer whose tokens have these ranks among a draft's."""
    at = count = 0
    while at < len(ranks):
        path: Ranks = ()
        while at + len(path) < len(ranks) and (*path, ranks[at + len(path)]) in tree:
            path = (*path, ranks[at + len(path)])
        at, count = at + len(path) + 1, count + 1
    return count


def shapes(answers: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Tokens a pass of chains and trees over answers given as ranks."""
    every = [rank for ranks in answers for rank in ranks]
    shares = [every.count(rank) / len(every) for rank in range(RANKS)]

    def pace(tree: Collection[Ranks]) -> float:
        return len(every) / sum(passes(ranks, tree) for ranks in answers)

    return {"shares": shares, "shapes": [
        {"nodes": nodes, "chain": pace({(0,) * n for n in range(1, nodes + 1)}),
         "tree": pace(best_tree(shares, nodes, nodes))} for nodes in NODES]}


@torch.no_grad()
def measure(new: int) -> list[dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    folder = demo_checkpoint()
    tokenizer = load_tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = {}
    for name, text in (TEXTS | MORE).items():
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        said = model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)[0]
        answers[name] = said, ids.shape[1]
    for name, p in model.named_parameters():
        if p.dim() == 2:
            p.copy_(rounded(p, 8 if "embed" in name else 4, 64))
    lines = []
    for kind in ("repeats", "plain text"):
        ranks = []
        for name, (said, prompt) in answers.items():
            if (name in REPEATING) == (kind == "repeats"):
                logits = model(said[None, :-1]).logits[0, prompt - 1 :]
                ranks.append((logits > logits.gather(1, said[prompt:, None])).sum(1).tolist())
        lines.append({"text": kind} | shapes(ranks))
        pairs = ", ".join(f"{s['nodes']} tokens: chain {s['chain']:.2f}, tree {s['tree']:.2f}"
                          for s in lines[-1]["shapes"])
        print(f"{kind:<10} ranks {', '.join(f'{100 * share:.0f}' for share in lines[-1]['shares'])} %; {pairs}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    args = parser.parse_args()
    lines = measure(args.new)
    if args.json:
        args.json.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
