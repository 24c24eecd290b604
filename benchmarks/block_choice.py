"""Which estimate of a cache block's weight keeps a fact of a long text: `python -m benchmarks.block_choice`.

By transformers and torch alone: SmolLM2-135M reads a text exactly. What follows then sees the first block of the KV
cache, the newest, and those with the largest weights by each estimate, in each layer.

perplexity  of the 64 tokens that follow the text.
last        A sentence names a number within the text, and the end asks for it. Answers found, of those asked for; the
            question's last token and the answer's see chosen blocks.
question    The same, where all tokens of the question see chosen blocks.

A block's weight is summed over heads, because K and V of all heads lie together. `exact` layers at the beginning see
everything.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import arguments, print_table, write_json
from benchmarks.perplexity import TEXT, text_ids
from benchmarks.probes import processor
from forebay.rewriter.checkpoints.resolve import resolve_model

FOLLOWING = 64  # tokens
FACT, QUESTION = " The secret number of the old lighthouse is {}.", " The secret number of the old lighthouse is"
Estimate = Callable[[Tensor, Tensor], Tensor]  # [H, T, parts] of scaled queries [H, T, D], keys [H, parts, tokens, D]


def bound(q: Tensor, keys: Tensor) -> Tensor:
    """The largest score that a key of a part can have (Quest, section 3)."""
    return q.clamp_max(0) @ keys.amin(2).mT + q.clamp_min(0) @ keys.amax(2).mT


def mean(q: Tensor, keys: Tensor) -> Tensor:
    """The score of the mean key."""
    return q @ keys.mean(2).mT


def spread(q: Tensor, keys: Tensor) -> Tensor:
    """The log of the mean exponent of scores, as if keys were normal with the part's mean and variance by element."""
    return mean(q, keys) + q.square() @ keys.var(2, correction=0).mT / 2


def mass(q: Tensor, keys: Tensor) -> Tensor:
    """The exact log of the sum of exponents of scores."""
    return (q @ keys.flatten(1, 2).mT).unflatten(-1, keys.shape[1:3]).logsumexp(-1)


def rounded(bits: int) -> Estimate:
    """The mass of keys that have so many bits an element, by the ends of their part."""
    def estimate(q: Tensor, keys: Tensor) -> Tensor:
        low, high = keys.amin(2, keepdim=True), keys.amax(2, keepdim=True)
        step = (high - low).clamp_min(1e-9) / (2**bits - 1)
        return mass(q, low + ((keys - low) / step).round() * step)

    return estimate


ESTIMATES: dict[str, Estimate] = {
    "bound": bound, "mean": mean, "spread": spread, "mass": mass, "1 bit": rounded(1), "2 bits": rounded(2)}


@dataclass(frozen=True)
class Rule:
    """A choice of blocks: an estimate for parts of `part` tokens, which are added up to blocks of `block`."""

    estimate: str
    part: int
    block: int
    share: float
    exact: int = 0


RULE: list[Rule | None] = [None]  # that attention goes by; None sees everything


def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **others: Any) -> Any:
    """For transformers: causal attention of one sequence whose queries see the blocks that a rule chooses."""
    group, tokens, length = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    keys, values, rule = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1), RULE[0]
    position = torch.arange(length - tokens, length)
    seen = torch.arange(length) <= position[:, None]
    if rule is not None and module.layer_idx >= rule.exact:
        seen = seen & chosen(query[0].float() * scaling, keys[0].float(), position, rule)
    out = torch.nn.functional.scaled_dot_product_attention(query, keys, values, seen, scale=scaling)
    return out.transpose(1, 2), None


def chosen(q: Tensor, keys: Tensor, position: Tensor, rule: Rule) -> Tensor:
    """Whether queries [H, T, D] at positions [T] see each of keys [H, length, D]: [T, length]."""
    blocks, length = keys.shape[1] // rule.block, keys.shape[1]
    parts = keys[:, : blocks * rule.block].unflatten(1, (-1, rule.part))
    scores = ESTIMATES[rule.estimate](q, parts).unflatten(-1, (blocks, -1)).logsumexp(-1)
    full = position // rule.block
    valid = torch.arange(blocks) < full[:, None]
    weights = scores.masked_fill(~valid, -math.inf).softmax(-1).sum(0).masked_fill(~valid, -1)
    weights[:, 0] = math.inf
    weights.scatter_(1, full[:, None] - 1, math.inf)
    count = (rule.share * full).ceil().clamp_min(2)
    named = weights.argsort(-1, descending=True).argsort(-1) < count[:, None]
    newest = torch.arange(length) >= (full * rule.block)[:, None]
    return newest | torch.nn.functional.pad(named.repeat_interleave(rule.block, -1), (0, length - blocks * rule.block))


class Reader:
    """The model, with attention by RULE."""

    def __init__(self) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer

        AttentionInterface.register("chosen", attend)
        AttentionMaskInterface.register("chosen", lambda *args, **others: None)
        folder = resolve_model("demo", dequantize=True)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation="chosen").eval()
        self.tokenizer, self.text = AutoTokenizer.from_pretrained(folder), text_ids(folder, TEXT)

    def ids(self, text: str) -> Tensor:
        return torch.tensor(self.tokenizer(text)["input_ids"])

    @torch.no_grad()
    def after(
        self, ids: Tensor, starts: list[int], rules: list[Rule | None]
    ) -> Iterator[tuple[int, Rule | None, Tensor]]:
        """The log-probabilities of what follows each token of ids from each start on, by each rule."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        for start in starts:
            RULE[0] = None
            self.model(ids[None, cache.get_seq_length() : start], past_key_values=cache, logits_to_keep=1)
            for RULE[0] in rules:
                logits = self.model(ids[None, start:-1], past_key_values=cache).logits[0]
                cache.crop(start - len(ids) + 1)
                yield start, RULE[0], logits.float().log_softmax(-1)


def main() -> None:
    args = arguments(__doc__, context=(2048, "tokens"), facts=(6, "that are asked for"),
                     estimates=(["bound-16", "mean-8", "2 bits-16", "mass-16"], "estimates and tokens of their parts"),
                     block=(16, "tokens of a block"), shares=([0.05, 0.1, 0.25], "of the blocks"),
                     exact=(0, "layers that see everything"))
    reader, found = Reader(), defaultdict[Rule | None, dict[str, list[float]]](lambda: defaultdict(list))
    rules: list[Rule | None] = [None, *(
        Rule(name, int(part), args.block, share, args.exact)
        for name, _, part in (text.partition("-") for text in args.estimates)
        for share in args.shares)]
    ids = reader.text[: args.context + FOLLOWING]
    for _, rule, scores in reader.after(ids, [args.context], rules):
        found[rule]["perplexity"] = [math.exp(-scores.gather(1, ids[args.context + 1 :, None]).mean())]
    for i in range(args.facts):
        number = f"{3571 * (i + 2) % 9000 + 1000}"
        fact, question, answer = (reader.ids(text) for text in (FACT.format(number), QUESTION, f" {number}"))
        room = args.context - len(fact) - len(question) + 1
        at = (2 * i + 1) * (room - 256) // (2 * args.facts)
        whole = torch.cat((reader.text[:at], fact, reader.text[at:room], question, answer))
        cases = {len(whole) - len(answer) - tokens: case for case, tokens in (("question", len(question)), ("last", 1))}
        for start, rule, scores in reader.after(whole, [*cases], rules):
            found[rule][cases[start]].append(bool((scores[-len(answer) :].argmax(-1) == answer).all()))
    sums = {rule: {case: sum(values) for case, values in of.items()} for rule, of in found.items()}
    print_table([(asdict(rule) if rule else {"estimate": "all blocks"}) | row for rule, row in sums.items()])
    rows = [{"rule": rule and asdict(rule)} | row for rule, row in sums.items()]
    write_json(args, {"processor": processor(), "context": args.context, "facts": args.facts, "rows": rows})


if __name__ == "__main__":
    main()
