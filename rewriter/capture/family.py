"""A record for each family of models that capture cannot take as transformers writes it: the one place that knows it.

Most families need none: their attention goes through transformers' interface. The records are in `own_attention.py`,
with what takes the place of the families' own code; `register_family` adds one that lies elsewhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, NoReturn

import torch
from torch import nn

from forebay.rewriter.capture.errors import CaptureError
from forebay.rewriter.capture.patterns import LayerType

# The argument of models of recurrent layers alone, by which they take their states; `cache` from transformers 5.24.
RECURRENT_CACHE = "cache_params"
Replacement = tuple[str, Callable[[Any], Callable[..., Any]]]


@dataclass(frozen=True)
class Family:
    """Facts about a model family that capture needs.

    Attributes:
        model: The name of the class of its causal language models.
        replaced: By the name of a class of modules, an attribute (most often "forward") and a function that makes, of a
            module, what takes its place.
        prepare: Changes the model, which is on the meta device, in other ways.
        holds_positions: Whether the rows of its cache, by its config, hold positions beside keys and values, so that
            they must not be rounded.
        layer_types: What layers see by the names in `config.layer_types`, beside those of `patterns.LAYER_TYPES`.
        layer_index: The attribute by which modules know the number of their layer, if it is not `layer_idx`.
        check: Raises CaptureError for a model in memory whose weights are not those of its checkpoint.
        refused: Why no model of the family can be captured, if it cannot.
    """

    model: str
    replaced: Mapping[str, Replacement] = field(default_factory=dict)
    prepare: Callable[[Any], None] = lambda model: None
    holds_positions: Callable[[Any], bool] = lambda config: False
    layer_types: Mapping[str, LayerType] = field(default_factory=dict)
    layer_index: str = ""
    check: Callable[[Any], None] = lambda model: None
    refused: str = ""


def require_release(what: str) -> NoReturn:
    """Raise CaptureError: `what` is written in another way in older releases of transformers."""
    raise CaptureError(f"{what} need transformers 5.23 or newer, and {version('transformers')} is installed")


FAMILIES: dict[str, Family] = {}
_PLAIN = Family("")


def register_family(family: Family) -> Family:
    """Add a record; returns it. ValueError where its model has one already."""
    if family.model in FAMILIES:
        raise ValueError(f"register_family: {family.model} has a record already")
    FAMILIES[family.model] = family
    return family


def family_of(model: nn.Module) -> Family:
    """The record of a model's family; an empty one for those that need none."""
    return FAMILIES.get(type(model).__name__, _PLAIN)


def adopt_family(model: nn.Module) -> None:
    """Let a model's modules do what the record of its family says."""
    family = family_of(model)
    if family.refused:
        raise CaptureError(family.refused)
    for module in model.modules():
        found = family.replaced.get(type(module).__name__)
        if found is not None:
            name, prepare = found
            vars(module)[name] = prepare(module)
        if family.layer_index in vars(module):  # else all layers would differ in it
            vars(module)[family.layer_index] = None
    family.prepare(model)


def outer_inputs(model: nn.Module, positions: torch.Tensor) -> dict[str, torch.Tensor]:
    """Inputs of the model's forward besides tokens: their positions [B, S], where it takes any. A mask of four
    dimensions is passed on as it is, and nobody reads it."""
    taken = inspect.signature(model.forward).parameters
    if "position_ids" in taken:
        return {"position_ids": positions}
    if RECURRENT_CACHE in taken or getattr(model, "_is_stateful", False):  # its layers know no positions
        return {}
    if family_of(model) is not _PLAIN:
        return {"attention_mask": torch.zeros(1, 1, 1, 1, dtype=torch.bool)}
    raise CaptureError("it does not accept position_ids, so sequences of unequal length cannot share a batch")
