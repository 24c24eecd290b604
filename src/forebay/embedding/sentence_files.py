"""How a folder makes an embedding of a text, as files of sentence-transformers say."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.ir.files import read_input
from forebay.rewriter.one_thread import one_thread

MODULES = "modules.json"
MASKED = "ForMaskedLM"
POOLINGS = {
    "cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max", "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean_tokens": "weightedmean", "lasttoken": "lasttoken"}


@dataclass(frozen=True)
class SentenceFiles:
    """The settings of a folder.

    Attributes:
        transformer: The folder of the transformer and its tokenizer.
        most_tokens: Of a text; None: what the tokenizer says.
        lower: Whether texts are put in lower case.
        poolings: Ways to make one vector of all tokens' vectors; the results are joined.
        include_prompt: Whether tokens of a prompt in front of a text count.
        dense: Folders of matrices that follow.
        normalize: Whether vectors have length 1.
        prompts: Texts in front of others, by name.
        default_prompt: Name of the one that is used where none is asked for.
        similarity: How two vectors are compared.
    """

    transformer: Path
    most_tokens: int | None = None
    lower: bool = False
    poolings: tuple[str, ...] = ("mean",)
    include_prompt: bool = True
    dense: tuple[Path, ...] = ()
    normalize: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    similarity: str = "cosine"


def is_embedder(folder: Path) -> bool:
    """Return whether a folder holds files of sentence-transformers for embeddings, or an encoder alone, whose tokens'
    vectors are averaged."""
    return not scores_by_logits(folder) if (folder / MODULES).is_file() else _is_encoder(folder)


@one_thread
def _is_encoder(folder: Path) -> bool:
    """Return whether a folder holds an encoder without a head, or with one for masked tokens."""
    try:
        config = read_settings(folder / "config.json", {})
        (name,) = config["architectures"]
        if config.get("is_encoder_decoder") or name.endswith("LMHeadModel") or not name.endswith(("Model", MASKED)):
            return False
        from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

        return config["model_type"] in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    except (CheckpointError, LookupError, TypeError, ValueError, AttributeError):  # said by who opens it
        return False


def scores_by_logits(folder: Path) -> bool:
    """Return whether files of sentence-transformers say that a causal model scores documents."""
    try:
        return any(str(each["type"]).endswith("LogitScore") for each in read_settings(folder / MODULES, []))
    except (CheckpointError, LookupError, TypeError):  # said by who opens it
        return False


def read_sentence_files(folder: Path) -> SentenceFiles:
    """Read a folder's settings; tokens' vectors are averaged where it has none. CheckpointError for modules that are
    not known."""
    general = read_settings(folder / "config_sentence_transformers.json", {})
    found: dict[str, Any] = {
        "transformer": folder, "prompts": dict(general.get("prompts") or {}),
        "default_prompt": general.get("default_prompt_name"),
        "similarity": general.get("similarity_fn_name") or "cosine"}
    dense: list[Path] = []
    for module in read_settings(folder / MODULES, []):
        kind, path = str(module.get("type", "")).rpartition(".")[2], folder / str(module.get("path", ""))
        if kind == "Transformer":
            settings = read_settings(path / "sentence_bert_config.json", {})
            found |= {"transformer": path, "most_tokens": settings.get("max_seq_length"),
                      "lower": bool(settings.get("do_lower_case"))}
        elif kind == "Pooling":
            settings = read_settings(path / "config.json", {})
            found |= {"poolings": _poolings(settings, path), "include_prompt": settings.get("include_prompt", True)}
        elif kind == "Dense":
            dense.append(path)
        elif kind == "Normalize":
            found["normalize"] = True
        else:
            raise CheckpointError(f"{folder / MODULES} has a module of type {kind!r}; known are Transformer, Pooling, "
                                  "Dense and Normalize")
    return SentenceFiles(dense=tuple(dense), **found)


def _poolings(settings: dict[str, Any], path: Path) -> tuple[str, ...]:
    mode = settings.get("pooling_mode")
    if mode is None:
        names = tuple(POOLINGS[name.removeprefix("pooling_mode_")] for name, on in settings.items()
                      if name.removeprefix("pooling_mode_") in POOLINGS and on is True)
    else:
        names = tuple(mode) if isinstance(mode, list) else (str(mode),)
    if not names or not set(names) <= set(POOLINGS.values()):
        raise CheckpointError(f"{path / 'config.json'} names no pooling that is known: {', '.join(POOLINGS.values())}")
    return names


def read_settings(path: Path, missing: Any) -> Any:
    """Read JSON of the type of `missing`, which stands for a file that is not there; CheckpointError for anything
    else."""
    if not path.is_file():
        return missing
    try:
        value = json.loads(read_input(path))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, type(missing)):
        raise CheckpointError(f"{path} must hold a JSON {'list' if isinstance(missing, list) else 'object'}")
    return value
