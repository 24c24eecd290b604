"""Multi-head latent attention (DeepSeek-V2: arXiv 2405.04434, section 2.1): one row [latent; rotated] for each token is
all that is kept, and the matrices that would make keys and values of it are absorbed.

Where a head's key is [W_k c; r] and its value W_v c, of the latent c and the rotated part r that all heads share, its
scores are [W_k^T q; q'] · [c; r], and its result is W_v of the latents' weighted sum: attention of all heads over one
head of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from forebay.kernels.operators import KV_APPEND
from forebay.rewriter.capture.errors import CaptureError
from forebay.rewriter.capture.layer_states import layer_state, starts, states_before
from forebay.rewriter.ir.state import LatentState


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
    """Let modules attend to all tokens where an indexer would pick some (DeepSeek-V3.2: arXiv 2512.02556, section 2.1).

    Of a context of at most as many tokens as it picks, it picks all: contexts here are no longer.
    """
    config = model.config
    for module in model.modules():
        if not hasattr(module, "indexer"):
            continue
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

    def forward(*args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        return own(*args, past_key_values=LatentRows(), **kwargs | more)

    return forward
