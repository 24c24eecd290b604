"""Capture a Hugging Face causal language model as one step graph and one block graph per kind of layer."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from forebay.kernels.operator import HOST_MEMORY
from forebay.rewriter.capture.errors import CaptureError
from forebay.rewriter.checkpoints.records import AddedTensors
from forebay.rewriter.checkpoints.text_model import (
    causal_class,
    is_unsupported_multimodal,
    not_causal,
    text_config,
)
from forebay.rewriter.garbage import no_collection
from forebay.rewriter.ir.byte_sizes import format_nbytes
from forebay.rewriter.ir.graph import CapturedModel, Gives
from forebay.rewriter.one_thread import one_thread

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["CaptureError", "capture_model", "tied_config"]
# Other outputs that a config may ask for, as training sets them. A step gives logits alone.
LOGITS_ALONE = {"output_router_logits": False, "output_attentions": False, "output_hidden_states": False,
                "return_dict": True}
MOST_TABLES_NBYTES = 256 << 20  # of masks and positions that a model computes when it is made


@one_thread
def capture_model(
    config_or_model: PreTrainedConfig | nn.Module, *, dtype: torch.dtype | None = None, gives: Gives = "last",
    architecture: type[PreTrainedModel] | None = None, runs: bool = True, embeds: bool = False,
    added: AddedTensors | None = None,
) -> CapturedModel:
    """Capture a causal language model from its transformers config, or from a model in memory.

    No weight is allocated or copied: a model in memory is read for its config and its parameters' names and shapes.
    `dtype` overrides the config's (or the model's), `architecture` the class that transformers has for the config. The
    step graph gives logits [B, V] at the token `last`; logits [B, S, V] of "all"; or "scores", float32 [B, S, 2]: the
    natural logarithm of the probability that each token gives to the one after it, and 1 where none was likelier, else
    0; `last` [B] is then the token that follows the chunk. With `embeds` it takes embeddings of tokens too. With
    `added` tensors adapters are part of it. Sizes B, S and L stay symbolic and may be 1. Raises `CaptureError` for a
    model whose attention cannot be replaced, or whose layers are not a plain chain; and, unless it is to be looked at
    alone (not `runs`), for one whose layers choose among experts.
    """
    from forebay.rewriter.capture.experts import adopt_experts, with_tables
    from forebay.rewriter.capture.family import family_of
    from forebay.rewriter.capture.lora import adopt_lora, with_adapters
    from forebay.rewriter.capture.recurrences import adopt_recurrences
    from forebay.rewriter.capture.trace import trace_model

    cls, config = _model_class(config_or_model)
    cls = architecture or cls
    if isinstance(config_or_model, nn.Module):
        config = tied_config(config_or_model)
    title = f"{cls.__name__} (model type {config.model_type!r}) cannot be captured"
    given = config_or_model if isinstance(config_or_model, nn.Module) else None
    if dtype is None:
        own = config.dtype if given is None else given.dtype
        dtype = own if isinstance(own, torch.dtype) else torch.float32
    with no_collection(), torch.no_grad(), _unlogged():
        try:
            model = _build(cls, config, dtype)
            if given is not None:
                _check_same_parameters(given, model)
                family_of(given).check(given)
            _refuse_mixers(cls, adopt_recurrences(model))
            tables = adopt_experts(model)
            if runs:
                _refuse_experts(model, tables)
            added = added or AddedTensors()
            shared = adopt_lora(model, added)
            captured = with_adapters(trace_model(model, gives, embeds, added.width), added, shared)
            return replace(with_tables(captured, tables),
                           token_types="token_type_ids" in inspect.signature(cls.forward).parameters)
        except CaptureError as error:
            raise CaptureError(f"{title}: {error}") from error
        except Exception as error:  # whatever the model's own code or the tracer objects to
            unset = [name for name, value in config.to_dict().items() if "expert" in name and value is None]
            if unset and isinstance(error, TypeError):
                raise CaptureError(f"{title}: its config gives no value for {', '.join(unset)}; add "
                                   f"{'it' if len(unset) == 1 else 'them'} to config.json") from error
            said = " ".join(str(error).split())[:200]
            raise CaptureError(f"{title}: its own code cannot be traced ({type(error).__name__}: {said})") from error


def tied_config(model: Any) -> PreTrainedConfig:
    """Get the config of a model in memory, which ties the output head to the embedding where the model does.

    transformers unties a head that a checkpoint stores with values of its own, and leaves the config as it is.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    weights = [getattr(module, "weight", None) for module in (head, embedding)]
    tied = weights[0] is weights[1]
    if None in (head, embedding) or tied == bool(getattr(model.config, "tie_word_embeddings", False)):
        return model.config
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = tied
    return config


@contextmanager
def _unlogged() -> Iterator[None]:
    """Without the tracebacks that torch writes of what an operator raises while it is traced, which is told once."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _model_class(config_or_model: Any) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    from transformers import PreTrainedConfig, PreTrainedModel

    if isinstance(config_or_model, PreTrainedConfig):
        config = text_config(config_or_model) or config_or_model
        if (cls := causal_class(config)) is None:
            raise CaptureError(not_causal(config))
        return cls, config
    if isinstance(config_or_model, PreTrainedModel):
        if is_unsupported_multimodal(config_or_model.config):
            raise CaptureError(not_causal(config_or_model.config))
        return type(config_or_model), config_or_model.config
    raise CaptureError(
        f"{type(config_or_model).__name__} is neither a transformers config nor a transformers model; "
        'use torch.compile(model, backend="forebay") for other modules'
    )


def _build(cls: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model on the meta device with our attention; only its non-persistent buffers hold values."""
    from transformers import initialization

    from forebay.rewriter.capture.attention import NAME, register_attention
    from forebay.rewriter.capture.latent import adopt_indexers, adopt_latents
    from forebay.rewriter.capture.own_attention import adopt_family  # with the records of all families
    from forebay.rewriter.capture.position_axes import choose_axes

    register_attention()
    built = NAME if cls._supports_attention_backend else "eager"
    config = copy.deepcopy(config)
    for name, value in LOGITS_ALONE.items():
        if getattr(config, name, value) != value:
            setattr(config, name, value)
    with torch.device("meta"), initialization.no_init_weights():
        model = cls._from_config(config, dtype=dtype, attn_implementation=built)
        model.tie_weights()
    model.config._attn_implementation = NAME
    adopt_family(model)
    adopt_latents(model)
    adopt_indexers(model)
    choose_axes(model)
    for module in model.modules():
        vars(module)["training"] = False  # as eval() does, a tenth of its time: setting attributes of modules is dear
    fill_constants(model)
    return model


def _refuse_mixers(cls: type[PreTrainedModel], adopted: int) -> None:
    """CaptureError for a class whose layers mix tokens in ways of their own; `adopted` modules call our operators."""
    from forebay.rewriter.capture.own_attention import FAMILIES
    from forebay.rewriter.capture.recurrences import has_known_mixers

    if adopted or cls.__name__ in FAMILIES or has_known_mixers(cls):
        return
    if cls._is_stateful:
        raise CaptureError("its layers keep a state by code of their own, which calls none of the convolutions, "
                           "recurrences and scans that have an operator here")
    if not cls._supports_attention_backend:
        raise CaptureError("its attention does not go through transformers' attention interface, so it cannot be "
                           "replaced by one that reads a streamed KV cache")


def _refuse_experts(model: nn.Module, tables: Collection[str]) -> None:
    from forebay.rewriter.capture.family import family_of

    ours, modules = family_of(model).replaced, dict(model.named_modules())
    for name, module in modules.items():
        owner = type(modules[name.rpartition(".")[0]]).__name__
        if name.endswith(".experts") and owner not in ours and f"{name}.table" not in tables and any(
                True for _ in module.parameters()):
            raise CaptureError("its layers choose among experts by token in code of their own, which goes through no "
                               "experts interface")


def _check_same_parameters(given: nn.Module, built: PreTrainedModel) -> None:
    want = {name: tuple(p.shape) for name, p in given.named_parameters()}
    have = {name: tuple(p.shape) for name, p in built.named_parameters()}
    if want != have:
        odd = sorted(name for name in want.keys() | have.keys() if want.get(name) != have.get(name))
        raise CaptureError(f"its parameters are not those its config describes, first difference at {odd[0]!r}")


def _tables(module: nn.Module) -> dict[str, torch.Tensor]:
    """The module's own non-persistent buffers: tables that no checkpoint holds."""
    return {k: b for k, b in module._buffers.items() if b is not None and k in module._non_persistent_buffers_set}


def _refuse_large_tables(model: PreTrainedModel) -> None:
    """Refuse a config whose computed tables exceed `MOST_TABLES_NBYTES`: no checkpoint bounds their length."""
    tables = {f"{name}.{key}": table for name, module in model.named_modules()
              for key, table in _tables(module).items()}
    total = sum(table.nbytes for table in tables.values())
    if total > MOST_TABLES_NBYTES:
        name, largest = max(tables.items(), key=lambda entry: entry[1].nbytes)
        raise CaptureError(f"its config asks for {format_nbytes(total)} of tables that no checkpoint holds, the "
                           f"largest {name} of {list(largest.shape)}; at most {format_nbytes(MOST_TABLES_NBYTES)} are "
                           "allowed")


def fill_constants(model: PreTrainedModel) -> None:
    """Give every non-persistent buffer its real value, by the same call that transformers' own loading uses.

    Filling twice over different contents shows whether every element was written.
    """
    _refuse_large_tables(model)
    inits: dict[str, Any] = {}  # by name of a module, the innermost model that holds it
    for name, module in model.named_modules():
        inits[name] = module if hasattr(module, "_init_weights") else inits[name.rpartition(".")[0]]
        buffers = _tables(module)
        if not buffers:
            continue
        filled: list[dict[str, torch.Tensor]] = []
        for content in (0, 1):
            module._buffers.update({k: torch.full_like(b, content, device=HOST_MEMORY) for k, b in buffers.items()})
            for owner in (module, model.base_model):  # some are set by the model that holds the module
                inits[name]._init_weights(owner)
            filled.append({k: module._buffers[k] for k in buffers})  # type: ignore[misc]
        for k in buffers:
            if not torch.equal(filled[0][k], filled[1][k]):
                raise CaptureError(f"its buffer {name}.{k} is not set by transformers' initialization")
