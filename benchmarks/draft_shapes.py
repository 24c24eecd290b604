"""Which bits and which shape of drafts would give how many tokens a pass: `python -m benchmarks.draft_shapes`.

SmolLM2 continues texts greedily, in float32; copies of it in fewer bits, whose head and embeddings have 8, say what
they think comes next behind each prefix of these answers. Where the model's own token stands among theirs is recorded.
From that follows what a pass would give, walking the answers: with a chain of the most likely tokens, and with the
best tree of as many tokens (each node's chance is the product of the shares of its ranks; the likeliest nodes are
taken, as by Sequoia's dynamic program where ranks are alike at every node), no deeper than a chain may be. The same of
what is looked up: a chain behind the longest and latest match, or a shorter one and others, still shorter, behind all
other matches. No time is measured.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.speculative import REPEATING, TEXTS
from forebay.commands.prompts import load_tokenizer
from forebay.kernels.quantization.quantize import reference
from forebay.rewriter.checkpoints.resolve import demo_checkpoint
from forebay.runtime.run.drafts import LONGEST_MATCH

MORE = {
    "letter": "Dear Professor Lindqvist,\n\nI am writing to ask whether",
    "recipe": "A simple soup for cold evenings. You need four carrots, two onions and",
    "history": "The printing press changed Europe in the fifteenth century because",
    "question": "Question: Why is the sky blue?\nAnswer:"}
COPIES = ((4, 64, "minmax"), (4, 64, "mse"), (3, 64, "minmax"), (3, 32, "minmax"), (3, 32, "mse"), (2, 32, "mse"),
          (2, 16, "mse"))  # bits, group, rounding
RANKS = 4  # most likely tokens of a draft that a tree may branch into
NODES = (3, 7, 15)  # tokens that a step checks beside the one that is known
LOOKUPS = ((7, 7, 0), (7, 5, 1), (7, 3, 2), (15, 15, 0), (15, 10, 2), (15, 6, 3))  # nodes, the chain's, each other's

Ranks = tuple[int, ...]


def rounded(weight: torch.Tensor, bits: int, group: int, rounding: str) -> torch.Tensor:
    """What rows of such a format would hold, scale and low in fp16."""
    groups = weight.float().unflatten(-1, (-1, group))
    scale, low = reference._min_max_range(groups, bits, torch.float16)
    if rounding == "mse":
        whole = torch.ones(groups.shape[-2:], dtype=torch.bool)
        scale, low = reference._least_squares_range(groups, whole, bits, scale, low)
    codes = reference._codes(groups, scale, low, bits)
    return (codes * scale.float()[..., None] + low.float()[..., None]).flatten(-2)


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

    def chain(length: int) -> set[Ranks]:
        return {(0,) * n for n in range(1, length + 1)}

    lines = [{"nodes": nodes, "chain": pace(chain(nodes)), "tree": pace(best_tree(shares, nodes, nodes))}
             for nodes in NODES]
    wide = {"deepest": 5, "nodes": 15, "chain": pace(chain(5)), "tree": pace(best_tree(shares, 15, 5))}
    return {"shares": shares, "shapes": lines, "wide": wide}


def continuations(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """What followed the last tokens where they stood before, repeated to the length of the longest chain: behind the
    longest matches first, of those as long behind the latest."""
    at: dict[int, None] = {}
    for length in range(LONGEST_MATCH, 0, -1):
        ends = (i for i in range(len(tokens) - 1, length - 1, -1)
                if tokens[i - length : i] == tokens[len(tokens) - length :])
        at |= dict.fromkeys(ends)
    return [tuple(tokens[i + j % (len(tokens) - i)] for j in range(NODES[-1])) for i in at]


def lookup_pace(answers: Sequence[tuple[list[int], int]], nodes: int, chain: int, other: int) -> float:
    """Tokens a pass of answers, each behind a prompt of so many tokens, by such a tree of what is looked up."""
    tokens = passes = 0
    for said, prompt in answers:
        at = prompt + 1
        while at < len(said):
            tree = dict.fromkeys(path[:n] for i, path in enumerate(continuations(said[:at]))
                                 for n in range(1, (other if i else chain) + 1))
            kept, n = {*[*tree][:nodes]}, 0
            while at + n < len(said) and tuple(said[at : at + n + 1]) in kept:
                n += 1
            at, passes = at + n + 1, passes + 1
        tokens += len(said) - prompt - 1
    return tokens / passes


@torch.no_grad()
def measure(new: int) -> list[dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    folder = demo_checkpoint()
    tokenizer, texts = load_tokenizer(folder), TEXTS | MORE
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = {}
    for name, text in texts.items():
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        said = model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)[0]
        answers[name] = said, ids.shape[1]
    kinds = {"repeats": REPEATING, "plain text": tuple(set(texts) - set(REPEATING))}
    lines: list[dict[str, Any]] = []
    for kind, names in kinds.items():
        told = [(answers[name][0].tolist(), answers[name][1]) for name in names]
        lines.append({"text": kind, "looked_up": {str(shape): lookup_pace(told, *shape) for shape in LOOKUPS}})
        print(f"looked up, {kind}: " + ", ".join(
            f"{nodes} tokens, {chain} behind the best match and {other} behind others "
            f"{lines[-1]['looked_up'][str((nodes, chain, other))]:.2f}" for nodes, chain, other in LOOKUPS), flush=True)
    whole = {name: p.clone() for name, p in model.named_parameters() if p.dim() == 2}
    for bits, group, rounding in COPIES:
        for name, p in model.named_parameters():
            if name in whole:
                tied = "embed" in name
                p.copy_(rounded(whole[name], 8 if tied else bits, 64 if tied else group,
                                "minmax" if tied else rounding))
        ranks = {}
        for name, (said, prompt) in answers.items():
            logits = model(said[None, :-1]).logits[0, prompt - 1 :]
            ranks[name] = (logits > logits.gather(1, said[prompt:, None])).sum(1).tolist()
        for kind, names in kinds.items():
            lines.append({"bits": bits, "group": group, "rounding": rounding, "text": kind}
                         | shapes([ranks[name] for name in names]))
            report(lines[-1:])
    return lines


def report(lines: Sequence[dict[str, Any]]) -> None:
    for x in lines:
        pairs = ", ".join(f"{s['nodes']} tokens: chain {s['chain']:.2f}, tree {s['tree']:.2f}" for s in x["shapes"])
        shares, wide = ", ".join(f"{100 * share:.0f}" for share in x["shares"]), x["wide"]
        print(f"w{x['bits']}g{x['group']} {x['rounding']:<6} {x['text']:<10} ranks {shares} %; {pairs}; a chain of "
              f"{wide['deepest']} {wide['chain']:.2f}, a tree of {wide['nodes']} as deep {wide['tree']:.2f}",
              flush=True)


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
