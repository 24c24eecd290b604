"""An operator of torch and its record, from one function that makes the result and from what fills it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from forebay.kernels.operator import Call, Operator, Tensors, Use, laid

Bind = Callable[[Use], Call]


def filling(bind: Callable[..., Call]) -> Bind:
    """The `bind` of a record that passes a use's arguments, then its results, to a launcher; others by name."""
    return lambda use: bind(*use.args, *use.out, **use.kwargs)


def on_gpu(module: str, name: str) -> Bind:
    """`filling` with a launcher of a module that is imported at the first use, because it imports Triton."""
    return lambda use: filling(getattr(importlib.import_module(module), name))(use)


def define_operator(
    make: Callable[..., Tensor | None], *, writes: Sequence[str] = (), check: Callable[..., None] | None = None,
    **record: Any,
) -> Operator:
    """Define `forebay::NAME` and return its record, NAME being the name of `make` without its underscore.

    A call gives operands the layouts of the record, and runs what `bind` makes for their device.

    Args:
        make: The operator's signature and docstring; it returns the result to be filled, of fake tensors too.
        writes: The arguments that it writes, which must have their layout.
        check: Takes the arguments of a real call before `make` does.
        record: Fields of `Operator`.
    """
    signature = inspect.signature(make)

    def run(device: str) -> Callable[..., Tensor | None]:
        def call(*args: Any) -> Tensor | None:
            bound = signature.bind(*args)
            bound.apply_defaults()
            if check is not None:
                check(*bound.args)
            out = make(*bound.args)
            for name, layout in operator.layouts.items():
                if name not in writes and isinstance(given := bound.arguments[name], Tensor):
                    bound.arguments[name] = laid(given, layout)
            operator.bind[device](Tensors(bound.args, {}, () if out is None else (out,)))()
            return out

        return call

    schema = torch.library.infer_schema(make, mutates_args=writes)
    first, *others = record["bind"]
    name = f"forebay::{make.__name__.removeprefix('_')}"
    defined = torch.library.custom_op(name, run(first), mutates_args=writes, device_types=first, schema=schema)
    for device in others:
        defined.register_kernel(device, run(device))
    defined.register_fake(make)
    operator = Operator(defined._opoverload, **record)
    return operator
