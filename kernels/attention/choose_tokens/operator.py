"""`forebay::choose_tokens`: the positions that an indexer gives the most weight for each query of a step.

The lightning indexer of DeepSeek sparse attention (DeepSeek-V3.2: arXiv 2512.02556, section 2.1): a token's score is
the sum over the indexer's heads of weight * relu(q · k), with one key for all heads. `keys` keeps the keys of all
tokens. For the CPU alone.
"""

from __future__ import annotations

from torch import Tensor

from forebay.kernels.attention.choose_tokens.cpu import bind_choose_tokens, workspace_nbytes
from forebay.kernels.attention.choose_tokens.reference import reference
from forebay.kernels.define import define_operator, filling
from forebay.kernels.operator import Cost, Use, nbytes_of


def _choose_tokens(q: Tensor, weights: Tensor, k: Tensor, keys: Tensor, start: Tensor, count: int) -> Tensor:
    """q float32 [B, S, H, D], weights float32 [B, S, H], new keys k [B, S, D], those of all tokens `keys` [B, 1, L, D]
    of k's dtype, start int64 [B] -> int64 [B, S, count].

    k is written to `keys` at positions start[b] .. start[b] + S - 1. Query s at position p = start[b] + s then has the
    `count` positions of 0 .. p with the largest scores, in ascending order; with fewer positions all of them, then -1.
    ValueError for positions outside of `keys`.
    """
    return start.new_empty((*q.shape[:2], count))


def _cost(use: Use) -> Cost:
    q, weights, k, keys, start, _ = use.args
    batch, queries, heads, dim = q.shape
    return Cost(2 * batch * queries * heads * (dim + 1) * keys.shape[2], nbytes_of(q, weights, k, keys, start),
                nbytes_of(k, *use.out))


def _gpu_refusal(use: Use) -> str:
    count = use.args[5]
    return (f"prompt, new_tokens: a GPU has no kernel for this model's indexer, which contexts of over {count} tokens "
            f"need; let both be at most {count} together, or hide the GPU")


CHOOSE_TOKENS = define_operator(
    _choose_tokens,
    writes=("keys",),
    reference=reference,
    cost=_cost,
    bind={"cpu": filling(bind_choose_tokens)},
    refusal={"cuda": _gpu_refusal},
    workspace={"cpu": lambda use: workspace_nbytes(use.args[0], use.args[3])},
    layouts={"start": "dense", "keys": "columns"},
)
