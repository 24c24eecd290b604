"""GGUF tensors as they are: rows of blocks, put in the model's order, and repacked bit for bit where a format allows.

Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. All have groups of 32 and an fp16 scale
d: Q4_0 is (q - 8) d, Q4_1 is q d + m with an fp16 m, Q8_0 is q d with a signed byte q. With codes q + 128 and lows
-8 d and -128 d, which are exact in fp16 unless they overflow, every one of them is code * scale + low.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from forebay.kernels.formats import packing
from forebay.rewriter.checkpoints.checkpoint import CheckpointError
from forebay.rewriter.checkpoints.config import LOCAL_ONLY, meta_model
from forebay.rewriter.checkpoints.gguf import _dequantize, _Header, _read_header, _Tensor, _write_config, alone

FORMATS = {"Q4_0": "w4g32", "Q4_1": "w4g32", "Q8_0": "w8g32"}
GROUP = 32
PIECE_NBYTES = 4 << 20
DTYPE = torch.float32  # what weights that stay as they are, and activations, are computed in


@dataclass(frozen=True)
class GgufSource:
    """A GGUF file to be quantised; `model` is on the meta device."""

    path: Path
    header: _Header
    model: Any
    tensors: list[GgufTensor]
    fingerprint: str

    def write_files(self, folder: Path) -> None:
        """Write config.json, generation settings and tokenizer."""
        _write_config(self.path, self.header, folder, DTYPE)


def open_gguf(path: Path) -> GgufSource:
    """The tensors of a GGUF file that the transformers model of its architecture has; no weight is read."""
    from transformers import AutoConfig
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    header = _read_header(path)
    with alone(path) as only:
        config = AutoConfig.from_pretrained(only, gguf_file=path.name, **LOCAL_ONLY)
    model = meta_model(config)
    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=config.to_dict())
    flat = SimpleNamespace(config=config, state_dict=model.state_dict, named_children=tuple)  # see gguf.py
    targets = get_gguf_hf_weights_map(flat, processor)
    parameters = model.state_dict(keep_vars=True)
    tensors = []
    for tensor in sorted(header.tensors, key=lambda t: t.offset):
        name = targets.get(tensor.name)
        if name is None:
            continue
        shape = tuple(parameters[name].shape)
        if math.prod(tensor.shape) != math.prod(shape):
            raise CheckpointError(f"{path}: {tensor.name} is {tensor.shape}, but {name} of this model is {shape}")
        tensors.append(GgufTensor(path, tensor, processor, name, shape))
    stored = {id(parameters[tensor.name]) for tensor in tensors}
    missing = [name for name, value in parameters.items() if id(value) not in stored]
    if missing:
        raise CheckpointError(f"{path} is incomplete: no tensor for {', '.join(missing[:5])} ({len(missing)} in all)")
    status = os.stat(path)
    identity = f"{path.name} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
    return GgufSource(path, header, model, tensors, identity)


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the file under the name and with the shape that the model gives it."""

    path: Path
    tensor: _Tensor
    processor: Any
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = DTYPE

    def format(self) -> str:
        found = FORMATS.get(self.tensor.kind.name, "")
        if not found or self._order() is None:
            return ""
        return found if self._representable() else ""

    def contents(self) -> Iterator[torch.Tensor]:
        order = self._order()
        if order is None or order[1]:
            yield _dequantize(self.path, self.tensor, self.processor).to(self.dtype).reshape(self.shape)
            return
        rows = self.rows(False)
        step = max(1, PIECE_NBYTES // (4 * self.shape[1]))
        for n in range(0, self.shape[0], step):
            yield rows(n, n + step)

    def rows(self, transposed: bool) -> Any:
        order = self._order()
        if order is None or order[1] != transposed:
            whole = _dequantize(self.path, self.tensor, self.processor).reshape(self.shape)
            matrix = whole.t() if transposed else whole
            return lambda lower, upper: matrix[lower:upper].contiguous()
        from gguf import dequantize

        blocks, kind = self._blocks(), self.tensor.kind
        return lambda lower, upper: torch.from_numpy(dequantize(blocks[order[0][lower:upper]], kind))

    def repacked(self) -> Any:
        order = self._order()
        assert order is not None
        blocks, kind = self._blocks(), self.tensor.kind.name
        return lambda lower, upper: _repack(blocks[order[0][lower:upper]], kind)

    def _blocks(self) -> np.ndarray:
        """The file's bytes, a row of blocks to each row."""
        data = np.fromfile(self.path, dtype=np.uint8, count=self.tensor.nbytes, offset=self.tensor.offset)
        return data.reshape(self.tensor.shape[0], -1)

    def _order(self) -> tuple[np.ndarray, bool] | None:
        """Which row of the file each row of outputs is, and whether the model has the matrix transposed; None where
        the file's rows are not the model's in some order. Found by letting transformers order a numbered matrix."""
        if len(self.tensor.shape) != 2:
            return None
        count = self.tensor.shape[0]
        numbered = np.arange(count, dtype=np.int64)[:, None] * 2 + np.arange(2)
        taken: dict[str, dict[str, torch.Tensor]] = {"tensors": {}}
        try:
            result = self.processor.process(numbered, self.tensor.name, tensor_key_mapping={}, parsed_parameters=taken)
        except ValueError:  # it counts on the real number of columns
            return None
        made = np.asarray(next(iter(taken["tensors"].values())) if result.name is None else result.weights)
        for transposed, found in ((False, made), (True, made.T)):
            if found.shape != numbered.shape or (count == 2 and transposed):
                continue
            order = found[:, 0] // 2
            if np.array_equal(numbered[order], found):
                return order, transposed
        return None

    def _representable(self) -> bool:
        """Whether the lows, multiples of the scales, are finite in fp16."""
        if self.tensor.kind.name == "Q4_1":
            return True
        factor = 8 if self.tensor.kind.name == "Q4_0" else 128
        nbytes = 18 if self.tensor.kind.name == "Q4_0" else 34
        scales = self._blocks().reshape(-1, nbytes)[:, :2].copy().view(np.float16)
        return bool(np.all(np.abs(scales.astype(np.float32)) * factor <= np.finfo(np.float16).max))


def _repack(rows: np.ndarray, kind: str) -> torch.Tensor:
    """Rows of blocks [N, …] uint8 as rows of `packing` [N, R]."""
    count = rows.shape[0]
    if kind == "Q8_0":
        blocks = torch.from_numpy(rows.reshape(count, -1, 34))
        scale = blocks[..., :2].contiguous().view(torch.float16)[..., 0]
        return packing.pack_rows((blocks[..., 2:] ^ 128).flatten(1), scale, _times(scale, -128))
    header = 2 if kind == "Q4_0" else 4
    blocks = torch.from_numpy(rows.reshape(count, -1, header + GROUP // 2))
    scale = blocks[..., :2].contiguous().view(torch.float16)[..., 0]
    low = _times(scale, -8) if kind == "Q4_0" else blocks[..., 2:4].contiguous().view(torch.float16)[..., 0]
    nibbles = blocks[..., header:]  # byte i holds the elements i and i + 16
    codes = torch.cat((nibbles & 15, nibbles >> 4), -1).flatten(1)
    return packing.pack_rows(packing.pack_codes(codes, 4), scale, low)


def _times(scale: torch.Tensor, factor: int) -> torch.Tensor:
    return (scale.float() * factor).half()
