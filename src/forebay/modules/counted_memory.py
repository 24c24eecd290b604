"""Counts the bytes of tensors within a budget, before operators make them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from forebay.kernels.operator import HOST_MEMORY
from forebay.modules.operator_workspace import workspace_nbytes
from forebay.rewriter.ir.byte_sizes import format_nbytes
from forebay.rewriter.ir.plan import PlanError

MAX_KNOWN = 4096  # sizes of results that are remembered
aten = torch.ops.aten


class CountedMemory(TorchDispatchMode):
    """Counts the tensors that operators inside read and make, each storage once.

    An operator whose results have no room begins once `make_room` has given it; where there is none to give, it does
    not begin.

    Args:
        limit_nbytes: Of all tensors together.
        make_room: Frees some memory; False where nothing is left that could be freed.
        what: Who computes, for messages.

    Attributes:
        peak_nbytes: Most that tensors took so far.
        own_peak_nbytes: The same without what was reserved.
        high_nbytes: Most since `mark`.
        reserved_nbytes: Part of the limit that is in use outside, such as for reads under way.
    """

    def __init__(self, limit_nbytes: int, make_room: Callable[[], bool], what: str) -> None:
        super().__init__()
        self.limit_nbytes, self.peak_nbytes, self.reserved_nbytes, self.what = limit_nbytes, 0, 0, what
        self.high_nbytes, self.own_peak_nbytes, self._make_room = 0, 0, make_room
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        self._sum = 0  # of `_held`, some of which may be gone
        self._known: dict[Any, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.hold((args, kwargs))
        self.need(self._result_nbytes(func, args, kwargs))
        out = func(*args, **kwargs)
        self.hold(out)
        self.need(0)
        return out

    def hold(self, tensors: Any) -> None:
        """Count tensors that are there already."""
        for each in tree_leaves(tensors):
            if isinstance(each, torch.Tensor) and each.device.type == HOST_MEMORY.type:
                storage = each.untyped_storage()
                if storage._cdata not in self._held:
                    self._held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                    self._sum += storage.nbytes()

    def need(self, nbytes: int) -> None:
        """Make sure of room for so many bytes more; PlanError where there is none."""
        if self._sum + self.reserved_nbytes + nbytes <= self.high_nbytes:  # at most
            return
        while (needed := self.count() + nbytes) > self.limit_nbytes:
            if not self._make_room():
                raise PlanError(f"budget: these inputs need more than {format_nbytes(self.limit_nbytes)} while "
                                f"{self.what} computes them; give more, or fewer or smaller inputs at a time")
        self._note(needed)
        self.high_nbytes = max(self.high_nbytes, needed)

    def mark(self) -> int:
        """Count `high_nbytes` from now on; bytes in use now."""
        self.high_nbytes = self.count()
        self._note(self.high_nbytes)
        return self.high_nbytes

    def _note(self, nbytes: int) -> None:
        self.peak_nbytes = max(self.peak_nbytes, nbytes)
        self.own_peak_nbytes = max(self.own_peak_nbytes, nbytes - self.reserved_nbytes)

    def count(self) -> int:
        """Bytes in use now."""
        self._held = {key: held for key, held in self._held.items() if not held[0].expired()}
        self._sum = sum(size for _, size in self._held.values())
        return self._sum + self.reserved_nbytes

    def _result_nbytes(self, func: Any, args: Any, kwargs: Any) -> int:
        key = func, _signature(args), _signature(kwargs)
        if (found := self._known.get(key)) is not None:
            return found
        found = new_nbytes(func, args, kwargs)
        if func not in BY_CONTENTS:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[key] = found
        return found


def _signature(value: Any) -> Any:
    """Return the properties of an argument on which sizes of results depend."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride(), value.device.type
    if isinstance(value, (list, tuple)):
        return tuple(map(_signature, value))
    if isinstance(value, dict):
        return tuple((name, _signature(each)) for name, each in value.items())
    return None if isinstance(value, torch.Generator) else (type(value), value)


def new_nbytes(func: Any, args: Any, kwargs: Any) -> int:
    """Bytes of the storages that an operator makes for its results, and while it computes.

    An operator that cannot say before it runs is taken to make eight bytes of each element that it reads, for each of
    its results.
    """
    returns = func._schema.returns
    if not any("Tensor" in str(each.type) and each.alias_info is None for each in returns):
        return 0
    if func in BY_CONTENTS:
        args = BY_CONTENTS[func](*args)
        if isinstance(args, int):
            return args
    given = tree_map(_shadow, args), {name: _shadow_option(each) for name, each in kwargs.items()}
    if any(each.name == "device" for each in func._schema.arguments):
        if torch.device(kwargs.get("device") or HOST_MEMORY).type != HOST_MEMORY.type:
            return 0
        given[1]["device"] = torch.device("meta")
    known = {each.untyped_storage()._cdata for each in tree_leaves(given) if isinstance(each, torch.Tensor)}
    try:
        made = {storage._cdata: storage.nbytes() for each in tree_leaves(func(*given[0], **given[1]))
                if isinstance(each, torch.Tensor) for storage in (each.untyped_storage(),)}
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        elements = sum(each.numel() for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor))
        return 8 * elements * len(returns)
    found = sum(size for storage, size in made.items() if storage not in known)
    return found + workspace_nbytes(func, args, found)


def _shadow(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and not value.is_meta:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


def _shadow_option(value: Any) -> Any:
    return None if isinstance(value, torch.Generator) else tree_map(_shadow, value)


def _of_nonzero(tensor: torch.Tensor) -> int:
    return 8 * max(1, tensor.dim()) * int(tensor.count_nonzero())


def _of_selected(tensor: torch.Tensor, mask: torch.Tensor) -> int:
    """With two counts of elements of the broadcast shape, by which the kernel finds places."""
    tensor, mask = torch.broadcast_tensors(tensor, mask)
    return int(mask.count_nonzero()) * tensor.element_size() + 16 * mask.numel()


def _of_repeats(repeats: torch.Tensor, **options: Any) -> int:
    """With sums of the repeats."""
    return 8 * (int(repeats.sum()) + repeats.numel())


def _of_index(tensor: torch.Tensor, indices: Any) -> Any:
    """With the numbers of elements that masks let through in place of the masks."""
    found: list[torch.Tensor | None] = []
    for each in indices:
        if each is not None and each.dtype in (torch.bool, torch.uint8):
            found += [torch.empty(int(each.count_nonzero()), dtype=torch.int64, device="meta")] * each.dim()
        else:
            found.append(each)
    return tensor, found


# Operators whose results' sizes hang on contents: they give the bytes, or arguments whose shapes say them.
BY_CONTENTS: dict[Any, Callable[..., Any]] = {
    aten.nonzero.default: _of_nonzero,
    aten.masked_select.default: _of_selected,
    aten.index.Tensor: _of_index,
    aten.repeat_interleave.Tensor: _of_repeats,
}
