"""Facts about a model that are known before any weight is read: its files, its sizes, its text side, and whether it
runs here."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.commands.prompts import load_tokenizer, stop_ids
from forebay.commands.terminal import JobError, message_of
from forebay.embedding.embedder import Embedder
from forebay.embedding.reranker import Reranker, is_reranker
from forebay.embedding.sentence_files import is_embedder
from forebay.exported.bundle import is_bundle, read_bundle
from forebay.modules.encoder_decoder import encoder_decoder_class
from forebay.modules.open_folder import open_streamed
from forebay.modules.streamed_module import StreamedModule
from forebay.open_model import open_graphs
from forebay.rewriter.capture.experts import TABLE
from forebay.rewriter.capture.language_model import capture_model
from forebay.rewriter.checkpoints.adapted import made_of
from forebay.rewriter.checkpoints.checkpoint import Checkpoint, is_gguf
from forebay.rewriter.checkpoints.config import meta_model, read_config
from forebay.rewriter.checkpoints.expert_sources import StackedTensor
from forebay.rewriter.checkpoints.expert_tables import WeightPiece
from forebay.rewriter.checkpoints.gguf_header import GgufTensor, gguf_parts
from forebay.rewriter.checkpoints.gguf_repack import open_gguf
from forebay.rewriter.checkpoints.gguf_tensors import PlacedTensor, place_tensors
from forebay.rewriter.checkpoints.grouped import GroupedTensor
from forebay.rewriter.checkpoints.lora import is_adapter
from forebay.rewriter.checkpoints.match_weights import checkpoint_names, weight_names
from forebay.rewriter.checkpoints.matrices import find_matrices
from forebay.rewriter.checkpoints.open_checkpoint import open_checkpoint
from forebay.rewriter.checkpoints.packed import is_quantized, open_quantized
from forebay.rewriter.checkpoints.quantize import KEEP, Wish, choose_formats
from forebay.rewriter.checkpoints.quantize_source import open_folder_source
from forebay.rewriter.checkpoints.records import TensorRecord
from forebay.rewriter.checkpoints.resolve import locate_model, resolve_model
from forebay.rewriter.checkpoints.scheme import quantization_settings
from forebay.rewriter.checkpoints.source_tensor import SourceTensor
from forebay.rewriter.checkpoints.stored_tensors import spellings
from forebay.rewriter.checkpoints.text_model import text_config

ROLES = {"tied": "embedding and head", "embedding": "embedding", "head": "head", "experts": "experts"}
OTHERS, UNREAD, ADAPTER = "norms, biases and others", "not read", "adapter"
PICKS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts")  # experts of a token
NO_BUDGET = 1  # nothing is computed
IN_PLACE, PACKED = "read in place", "packed once into the cache folder"
HeldTensor = tuple[tuple[str, ...], str, int]  # of a stored tensor: the parameters that it holds, its format, its bytes


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of one kind in one format.

    Attributes:
        kind: What they are to the model: embedding, head, experts, or the module that they belong to.
        format: The format of the file: a dtype, a GGUF type, a tool's method, or one of Forebay's.
        tensors: How many lie in the files.
        parameters: Parameters of the model that they hold.
        nbytes: Bytes in the files.
    """

    kind: str
    format: str
    tensors: int
    parameters: int
    nbytes: int


@dataclass
class ModelDescription:
    """A model as its files describe it; fields after a `reason` to refuse it may be empty.

    Attributes:
        model: The user's name for it.
        path: The folder or file.
        container: safetensors, GGUF, bundle, forebay quantize, or the method of another tool.
        files: Files of weights.
        nbytes: Their bytes.
        architecture: The class of transformers.
        model_type: transformers' name of the architecture.
        layers: Decoder layers.
        parameters: All parameters of the language model, a tied head counted once.
        active_parameters: Those that a token meets, of experts as many as the router picks; None: not known.
        context: Positions; 0: no limit is known.
        vocabulary: Tokens of the embedding.
        dtype: What the model computes in.
        weights: Kinds of tensors and their formats.
        chat_templates: Names of the templates for chats; the unnamed one is "default".
        special_tokens: Tokens by their names, such as bos_token.
        ends: Tokens that end an answer.
        tokenizer: Why there is no tokenizer; "" where there is one.
        opens: Whether the files are read in place, or packed first.
        gives: "text", "embeddings" or "scores".
        adapters: Folders of adapters on top of it by name; "" is the name of one that serves all requests.
        runs: Whether this release runs the model.
        reason: Why it does not.
    """

    model: str
    path: str
    container: str = ""
    files: int = 0
    nbytes: int = 0
    architecture: str = ""
    model_type: str = ""
    layers: int = 0
    parameters: int = 0
    active_parameters: int | None = None
    context: int = 0
    vocabulary: int = 0
    dtype: str = ""
    weights: tuple[TensorGroup, ...] = ()
    chat_templates: tuple[str, ...] = ()
    special_tokens: dict[str, str] = field(default_factory=dict)
    ends: tuple[str, ...] = ()
    tokenizer: str = ""
    opens: str = ""
    gives: str = "text"
    adapters: dict[str, str] = field(default_factory=dict)
    runs: bool = False
    reason: str = ""


def describe_model(model: str) -> ModelDescription:
    """Describe a model without reading its weights.

    Raises:
        CheckpointError: There is no such model. One that is refused is described as far as its files can be read.
    """
    path = locate_model(model)
    if path.is_dir() and is_adapter(path):
        path = resolve_model(path)
    found = ModelDescription(model, str(path))
    try:
        _describe_gguf(path, found) if is_gguf(path) else _describe_folder(path, found)
        found.runs = True
    except Exception as error:
        reason = message_of(error)
        if reason is None:
            raise
        found.reason = reason
    return found


def _describe_gguf(path: Path, found: ModelDescription) -> None:
    found.container, found.opens = "GGUF", PACKED
    _note_files(found, map(str, gguf_parts(path)))
    source = open_gguf(path)
    found.dtype = str(source.dtype)[6:]
    found.weights = _groups(source.model, [((name,), tensor.kind.name, tensor.nbytes) for name, tensor in _placed(
        place_tensors(source.header, source.model))])
    _note_model(found, source.model)
    with tempfile.TemporaryDirectory(prefix="forebay-show-") as folder:
        source.write_files(Path(folder))
        _note_text(found, Path(folder))
    _check_formats(source.tensors, {each.name: each.name for each in source.tensors}, source.model)
    capture_model(source.model.config, dtype=source.dtype)


def _placed(placed: Mapping[str, Any]) -> Iterator[tuple[str, GgufTensor]]:
    """Each tensor of a file with the parameter that it is part of."""
    for name, each in placed.items():
        for piece in (each,) if isinstance(each, PlacedTensor) else each.pieces:
            yield name, piece.tensor


def _describe_folder(path: Path, found: ModelDescription) -> None:
    settings, bundle = quantization_settings(path), is_bundle(path)
    if not settings and not bundle and (streamed := _open_module(path, found)) is not None:
        _describe_module(path, streamed, found)
        return
    found.opens = PACKED if settings else IN_PLACE
    found.container = "bundle" if bundle else "forebay quantize" if is_quantized(path) else str(
        settings.get("quant_method")) if settings else "safetensors"
    # `never`: checksums are compared where weights are read
    checkpoint = open_quantized(path, check="never") if is_quantized(path) else open_checkpoint(path)
    _note_files(found, {record.path for record in checkpoint.tensors.values()})
    if (made := made_of(path)) is not None:
        found.path, found.adapters = str(made.base), {name: str(each) for name, each in made.adapters.items()}
    config = read_config(path, checkpoint.tensors)
    model = meta_model(text_config(config) or config)
    model.tie_weights()  # type: ignore[no-untyped-call]
    found.weights = _groups(model, list(_stored(
        checkpoint, model, weight_names(config), found.container if settings else "")))
    if added := list(checkpoint.added.tensors.values()):
        found.weights += (TensorGroup(ADAPTER, str(added[0].dtype)[6:], len(added), sum(
            math.prod(each.shape) for each in added), sum(each.nbytes for each in added)),)
    _note_model(found, model)
    _note_text(found, path)
    if settings:
        source = open_folder_source(path)
        _check_formats(source.tensors, source.names, source.model)
        captured = capture_model(source.model.config)
    else:
        captured = read_bundle(path)[0] if bundle else open_graphs(path, checkpoint, keep=True)[0]
    found.dtype = str(captured.dtype)[6:]


def _open_module(path: Path, found: ModelDescription) -> StreamedModule | None:
    """Open a model that runs as a module of transformers, and note what it gives; None for one that does not."""
    if (auto := encoder_decoder_class(path)) is not None:
        return open_streamed(path, auto)
    if is_embedder(path):
        found.gives = "embeddings"
        return Embedder(path, NO_BUDGET).streamed
    if is_reranker(path):
        found.gives = "scores"
        return Reranker(path, NO_BUDGET).streamed
    return None


def _describe_module(path: Path, streamed: StreamedModule, found: ModelDescription) -> None:
    found.container, found.opens, found.dtype = "safetensors", IN_PLACE, str(streamed.dtype)[6:]
    checkpoint, model = open_checkpoint(path), streamed.module
    _note_files(found, {record.path for record in checkpoint.tensors.values()})
    found.weights = _groups(model, list(_stored(checkpoint, model, checkpoint_names(model.config, type(model)), "")))
    _note_model(found, model)
    _note_text(found, path)


def _check_formats(tensors: Sequence[SourceTensor], names: Mapping[str, str], model: Any) -> None:
    """Raise CheckpointError for tensors that no conversion keeps packed."""
    for tensor in tensors:
        for piece in tensor.pieces if isinstance(tensor, StackedTensor) else (tensor,):
            if isinstance(piece, GroupedTensor):
                piece.check()
    choose_formats(tensors, names, find_matrices(model), Wish(KEEP, head=True, embeddings=True))


def _stored(
    checkpoint: Checkpoint, model: Any, naming: tuple[str, Callable[[str], str]], method: str
) -> Iterator[HeldTensor]:
    """Each tensor of a folder with the parameter that it is, or that it is part of where a tool quantized the model by
    a `method`; `naming` is the base model's prefix, and the renaming of checkpoint names."""
    prefix, rename = naming
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}

    def parameter(name: str) -> str:
        renamed = rename(name)
        piece = WeightPiece.of(renamed)
        return next((each for each in spellings(piece.parameter if piece else renamed, prefix) if each in known), "")

    modules = {name.rpartition(".")[0] for name in checkpoint.tensors if method and not parameter(name)}
    for name, record in checkpoint.tensors.items():
        module, _, last = name.rpartition(".")
        if (whole := parameter(name)):  # the codes of a matrix may have its name
            codes = last == "weight" and module in modules
            yield (whole,), method if codes else _format(record), record.nbytes
        elif method and (part := parameter(f"{module}.weight")):
            yield (part,), method, record.nbytes
        else:  # a bundle's table of a layer's experts, or what the model has no place for
            table = tuple(each for each in known if name.endswith(f".{TABLE}") and each.startswith(f"{module}."))
            yield table, _format(record), record.nbytes


def _format(record: TensorRecord) -> str:
    return record.packed.format if record.packed else record.opaque or str(record.dtype)[6:]


def _groups(model: Any, stored: Iterable[HeldTensor]) -> tuple[TensorGroup, ...]:
    """HeldTensor tensors by their kind and format, the most bytes first."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(each), name) for name, each in model.named_parameters(remove_duplicate=False)}
    sizes, matrices = {name: each.numel() for name, each in model.named_parameters()}, find_matrices(model)
    groups: dict[tuple[str, str], list[int]] = {}
    for held, format, nbytes in stored:
        own = [names[name] for name in held]
        matrix = matrices.get(own[0]) if own else None
        kind = UNREAD if not own else OTHERS if matrix is None else ROLES.get(matrix.role) or _module(own[0])
        group = groups.setdefault((kind, format), [0, 0, 0])
        # a parameter in several tensors counts once
        for i, count in enumerate((1, sum(sizes.pop(name, 0) for name in own), nbytes)):
            group[i] += count
    return tuple(TensorGroup(*key, *sums) for key, sums in sorted(groups.items(), key=lambda g: (-g[1][2], g[0])))


def _module(name: str) -> str:
    """The module that a matrix of a layer belongs to, as in self_attn; the matrix itself where the layer has it."""
    *_, parent, own, _ = ("", "", *name.split("."))
    return own if parent.isdigit() else parent


def _note_files(found: ModelDescription, paths: Iterable[str]) -> None:
    sizes = [os.stat(path).st_size for path in paths]
    found.files, found.nbytes = len(sizes), sum(sizes)


def _note_model(found: ModelDescription, model: Any) -> None:
    config = model.config
    found.architecture, found.model_type = type(model).__name__, config.model_type
    found.layers, found.vocabulary = (getattr(config, name, 0) for name in ("num_hidden_layers", "vocab_size"))
    found.context = getattr(config, "max_position_embeddings", None) or 0
    found.parameters = sum(each.numel() for each in model.parameters())
    found.active_parameters = _active_parameters(model)


def _active_parameters(model: Any) -> int | None:
    """The parameters that a token meets, on average; None where the config does not say how many experts it meets."""
    total, matrices = sum(each.numel() for each in model.parameters()), find_matrices(model)
    settings = (model.config, getattr(model.config, "ffn_config", None))
    picks = next((found for each in settings for name in PICKS if (found := getattr(each, name, None))), None)
    idle = 0.0
    for name, parameter in model.named_parameters():
        matrix = matrices.get(name.removesuffix("_bias"))
        if matrix is None or matrix.role != "experts":
            continue
        if picks is None:
            return None
        experts = model.get_submodule(matrix.module)
        met = picks * getattr(experts, "num_routed_experts", 1) / getattr(experts, "total_experts", 1)
        idle += parameter.numel() * (1 - met / (matrix.count or parameter.shape[0]))
    return round(total - idle)


def _note_text(found: ModelDescription, folder: Path) -> None:
    try:
        tokenizer = load_tokenizer(folder)
        found.ends = tuple(tokenizer.convert_ids_to_tokens(each) or f"token {each}" for each in stop_ids(
            folder, tokenizer))
    except JobError as error:  # a model runs on ids without one
        found.tokenizer = str(error)
        return
    templates = tokenizer.chat_template
    found.chat_templates = tuple(templates) if isinstance(templates, dict) else ("default",) if templates else ()
    found.special_tokens = {name: str(text) for name, text in tokenizer.special_tokens_map.items()
                            if isinstance(text, str)}
