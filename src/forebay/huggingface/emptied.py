"""A module whose weights have moved to disk."""

from __future__ import annotations

from typing import Any

import torch

from forebay.runtime.run.arena import return_freed_memory


def empty_module(module: torch.nn.Module) -> None:
    """Give back the memory of a module's parameters and persistent buffers, whose values now lie on disk; the module
    says so when it is called."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.new_empty(0)
    module.register_forward_pre_hook(_say_emptied)
    return_freed_memory()


def _say_emptied(module: torch.nn.Module, args: Any) -> None:
    raise RuntimeError(f"this {type(module).__name__} was emptied by forebay.wrap, which moved its weights to disk; "
                       "call what wrap returned")
