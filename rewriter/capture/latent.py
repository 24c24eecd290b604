"""Multi-head latent attention (DeepSeek-V2: arXiv 2405.04434, section 2.1): one row [latent; rotated] for each token is
all that is kept, and the matrices that would make keys and values of it are absorbed.

Where a head's key is [W_k c; r] and its value W_v c, of the latent c and the rotated part r that all heads share, its
scores are [W_k^T q; q'] · [c; r], and its result is W_v of the latents' weighted sum: attention of all heads over one
head of rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from forebay.kernels.operators import CHOOSE_TOKENS, KV_APPEND
from forebay.rewriter.capture.cache_name import cache_argument
from forebay.rewriter.capture.errors import CaptureError
from forebay.rewriter.capture.layer_states import layer_state, starts, states_before
from forebay.rewriter.ir.state import IndexState, LatentState


class Latent:
    """Steps of latent attention before and after it reads cache rows, for one module."""

    def __init__(self, module: Any) -> None:
        matrix = module.kv_b_proj
        self.matrix, self.rank, self.split = matrix, module.kv_lora_rank, module.qk_nope_head_dim
        self.outputs = self.split + module.v_head_dim
        if type(matrix) is not nn.Linear or matrix.bias is not None or (
                matrix.in_features != self.rank or matrix.out_features % self.outputs):
            raise CaptureError(f"{type(module).__name__} makes keys and values of latents by more than one matrix")

    def _heads(self) -> torch.Tensor:
        return self.matrix.weight.view(-1, self.outputs, self.rank)

    def absorb_keys(self, query: torch.Tensor) -> torch.Tensor:
        """Queries [B, H, S, nope + rope] as they meet rows: [B, H, S, rank + rope]."""
        batch, heads, tokens, _ = query.shape
        plain = query[..., : self.split].permute(1, 0, 2, 3).reshape(heads, batch * tokens, self.split)
        made = torch.bmm(plain, self._heads()[:, : self.split]).view(heads, batch, tokens, self.rank)
        return torch.cat((made.permute(1, 0, 2, 3), query[..., self.split :]), -1)

    def values(self, found: torch.Tensor) -> torch.Tensor:
        """The values [B, S, H, v] of weighted sums of rows [B, S, H, rank + rope]."""
        batch, tokens, heads, _ = found.shape
        sums = found[..., : self.rank].permute(2, 0, 1, 3).reshape(heads, batch * tokens, self.rank)
        made = torch.bmm(sums, self._heads()[:, self.split :].transpose(1, 2))
        return made.view(heads, batch, tokens, self.outputs - self.split).permute(1, 2, 0, 3)


class LatentRows:
    """In the place of the cache that such a module is given: the layer's rows, to which new ones are appended."""

    def update(
        self, latent: torch.Tensor, rotated: torch.Tensor, layer_idx: object, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        new = torch.cat((latent, rotated), -1)
        (rows,) = layer_state(LatentState(new.shape[-1], new.dtype, states_before(LatentState.kind)))
        KV_APPEND.overload(rows, rows, new, new, starts())  # keys and values are the same bytes
        return rows, rows

    def update_indexer(self, keys: torch.Tensor, layer_idx: object, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return an indexer's new keys alone: `Indexer` keeps them."""
        return keys


class _Scored(Exception):
    """An indexer is about to weigh the scores of its heads."""


class _Scores(TorchFunctionMode):
    """Reads queries, keys and weights off the two products of an indexer's own code, which ends at the second."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.matmul:
            self.products.append(args)
            if len(self.products) == 2:
                raise _Scored
        return func(*args, **kwargs or {})


class Indexer:
    """In the place of an indexer's forward (DeepSeek-V3.2: arXiv 2512.02556, section 2.1): its own code makes queries,
    keys and weights, and an operator keeps the keys and chooses tokens.

    The scale of its scores is left out: it changes no order.
    """

    PARTS = frozenset(("wq_b", "wk", "k_norm", "weights_proj"))

    def __init__(self, module: nn.Module) -> None:
        self.module, self.own = module, inspect.unwrap(type(module).forward)

    @classmethod
    def known(cls, module: nn.Module) -> bool:
        """Return whether a module computes by these parts alone, and says how many tokens it chooses."""
        own = dict(module.named_children()).keys() | dict(module.named_parameters(recurse=False)).keys()
        return own == cls.PARTS and hasattr(module, "index_topk")

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The positions that each query of a step attends to, [B, S, index_topk]."""
        try:
            with _Scores() as scores:
                self.own(self.module, *args, **kwargs)
        except _Scored:
            (query, keys), (weights, _) = scores.products
        else:
            raise CaptureError(f"{type(self.module).__name__} makes its scores in another way than the indexers known")
        new = keys.squeeze(1).transpose(1, 2)  # [B, S, D], in fp32 by now
        module: Any = self.module
        dtype = module.wk.weight.dtype
        (kept,) = layer_state(IndexState(new.shape[-1], dtype))
        found: torch.Tensor = CHOOSE_TOKENS.overload(query, weights.squeeze(2), new.to(dtype), kept, starts(),
                                                     module.index_topk)
        return found


class NoIndexer(nn.Module):
    """In the place of an indexer."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Pick none: attention then asks nobody which tokens it sees."""


class AllTokens:
    """In the place of the mask that an indexer is to narrow: every earlier token is attended to."""

    def __getitem__(self, index: object) -> AllTokens:
        return self


def adopt_latents(model: Any) -> None:
    """Let modules of latent attention keep rows and read them as they are (`attention.py` then asks `latent`)."""
    for module in model.modules():
        if hasattr(module, "expand_kv"):
            vars(module).update(latent=Latent(module), forward=_with_rows(module),
                                expand_kv=lambda latent, rotated: (latent, rotated))


def adopt_indexers(model: Any) -> None:
    """Let indexers choose the tokens that a layer attends to by an operator of ours. Where some are of another kind, or
    layers share what others chose, modules attend to all tokens: of a context of at most as many tokens as an indexer
    chooses, it chooses all, and contexts are then no longer.
    """
    config = model.config
    indexed = [module for module in model.modules() if hasattr(module, "indexer")]
    own = [module.indexer for module in indexed if isinstance(module.indexer, nn.Module)]
    if all(map(Indexer.known, own)) and not any(getattr(module, "skip_topk", False) for module in indexed):
        for indexer in own:
            vars(indexer)["forward"] = Indexer(indexer).forward
        return
    for module in indexed:
        if isinstance(module.indexer, nn.Module):
            picked = getattr(config, "index_topk", 0) or (
                getattr(config, "index_topk_blocks", 0) * getattr(config, "index_block_size", 0))
            if not picked:
                raise CaptureError(f"{type(module.indexer).__name__} picks the tokens that a layer attends to, and its "
                                   "config does not say how many")
            config.max_position_embeddings = min(config.max_position_embeddings, picked)
            vars(module.indexer)["forward"] = NoIndexer().forward
        elif hasattr(module, "expand_kv"):  # it shares what another layer's has picked
            module.indexer = NoIndexer()


def _with_rows(module: Any) -> Callable[..., Any]:
    own, more = module.forward, {"attention_mask": AllTokens()} if hasattr(module, "indexer") else {}
    cache = cache_argument(own)

    def forward(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs | more | {cache: LatentRows()})
        return *found[:2], *[None] * len(found[2:])  # chosen tokens go to no other layer

    return forward
