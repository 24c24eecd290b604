"""A PeftModel in memory, taken apart into its base and its adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from forebay.rewriter.checkpoints.lora import LoraAdapter, lora_adapter
from forebay.rewriter.checkpoints.module_weights import named_tensors
from forebay.rewriter.checkpoints.records import CheckpointError


class PeftParts(NamedTuple):
    """The parts of a PeftModel.

    Attributes:
        base: The model of transformers within, whose modules PEFT has replaced.
        tensors: Its weights, by the names that the base had without the adapter.
        adapter: What is active on top of them.
    """

    base: Any
    tensors: Mapping[str, torch.Tensor]
    adapter: LoraAdapter


def peft_parts(model: nn.Module) -> PeftParts | None:
    """Take a PeftModel apart; None for other modules.

    Raises:
        CheckpointError: Its adapter is merged, is not one alone, or is of a kind that is not implemented.
    """
    if not (hasattr(model, "peft_config") and hasattr(model, "get_base_model")):
        return None
    from peft import get_peft_model_state_dict

    peft: Any = model
    active = [peft.active_adapter] if isinstance(peft.active_adapter, str) else list(peft.active_adapter)
    if len(active) != 1:
        raise CheckpointError(f"the PeftModel has {len(active)} active adapters; choose one: model.set_adapter(name)")
    if any(getattr(module, "merged", False) for module in model.modules()):
        raise CheckpointError("the adapter of the PeftModel is merged; give what model.merge_and_unload() returns, or "
                              "call model.unmerge_adapter() first")
    base = peft.get_base_model()
    stored = get_peft_model_state_dict(peft, adapter_name=active[0], save_embedding_layers=False)
    reads = {name: (lambda tensor=tensor: tensor.detach()) for name, tensor in stored.items()}
    adapter = lora_adapter(f"the PeftModel's adapter {active[0]!r}", peft.peft_config[active[0]].to_dict(), reads)
    return PeftParts(base, _base_tensors(base), adapter)


def _base_tensors(base: nn.Module) -> dict[str, torch.Tensor]:
    """Weights of the base by their own names."""
    found = {}
    for name, tensor in named_tensors(base).items():
        if ".lora_" in name or ".modules_to_save." in name:
            continue
        found[name.replace(".base_layer.", ".").replace(".original_module.", ".")] = tensor
    return found
