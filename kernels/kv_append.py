"""Write a chunk's keys and values into the cache, each sequence at its own position."""

from __future__ import annotations

from collections.abc import Callable

import torch


def reference(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor
) -> None:
    """k and v [B, Hkv, S, D] into positions start[b] .. start[b] + S - 1 of the caches [B, Hkv, L, D]."""
    tokens = k.shape[2]
    starts = start.tolist()
    if min(starts) == max(starts):
        at = slice(starts[0], starts[0] + tokens)
        k_cache[:, :, at], v_cache[:, :, at] = k, v
        return
    rows = torch.arange(k.shape[0], device=k.device)[:, None]
    position = start.to(k.device)[:, None] + torch.arange(tokens, device=k.device)
    k_cache.transpose(1, 2).index_put_((rows, position), k.transpose(1, 2))
    v_cache.transpose(1, 2).index_put_((rows, position), v.transpose(1, 2))


@torch.library.custom_op("forebay::kv_append", mutates_args=("k_cache", "v_cache"))
def kv_append(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor
) -> None:
    """Append a chunk to the cache in place; see `reference`."""
    _check(k_cache, v_cache, k, v, start)
    reference(k_cache, v_cache, k, v, start)


@kv_append.register_fake
def _(k_cache, v_cache, k, v, start):  # type: ignore[no-untyped-def]
    return None


def _check(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor
) -> None:
    for name, cache, value in (("k", k_cache, k), ("v", v_cache, v)):
        if cache.dim() != 4 or value.dim() != 4 or (
                cache.shape[0], cache.shape[1], cache.shape[3]) != (value.shape[0], value.shape[1], value.shape[3]):
            raise ValueError(f"forebay::kv_append: {name} {list(value.shape)} does not fit {name}_cache "
                             f"{list(cache.shape)}")
        if cache.dtype != value.dtype:
            raise ValueError(f"forebay::kv_append: {name} is {value.dtype}, {name}_cache {cache.dtype}")
    if start.dtype != torch.int64 or tuple(start.shape) != (k.shape[0],):
        raise ValueError(f"forebay::kv_append: start must be int64 [{k.shape[0]}], is {start.dtype} {list(start.shape)}")


def bind_kv_append(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor
) -> Callable[[], None]:
    """A call without arguments that appends; `start` is read each time."""
    _check(k_cache, v_cache, k, v, start)
    return lambda: reference(k_cache, v_cache, k, v, start)
