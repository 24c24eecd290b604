"""Embeddings of token ids outside a step, from rows of the model's files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import fx

from forebay.kernels.quantization.dequantize_rows.reference import reference as dequantize_rows
from forebay.rewriter.checkpoints.checkpoint import read_tensor
from forebay.rewriter.checkpoints.records import TensorRecord
from forebay.rewriter.ir.graph import CapturedModel, WeightSpec, weight_name
from forebay.rewriter.ir.program import FileSlice


class TokenEmbeddings(torch.nn.Module):
    """Embeddings [..., H] of ids [...], as the step graph of `captured`, which takes embeddings, has them of ids."""

    def __init__(
        self, captured: CapturedModel, files: Mapping[str, FileSlice], check_files: Callable[[], None]
    ) -> None:
        super().__init__()
        (chosen,) = next(node for node in captured.step.graph.nodes if node.name == "inputs_embeds").users
        self.looked_up = cast("fx.Node", chosen.args[2])
        self.constants, self.files, self.check_files = captured.constants, files, check_files
        lookup = next(node for node in captured.step.graph.find_nodes(
            op="call_function", target=torch.ops.aten.embedding.default) if _leads_to(node, self.looked_up))
        self.lookup, self.spec = lookup, captured.weights[cast(str, weight_name(cast("fx.Node", lookup.args[0])))]
        self.num_embeddings, self.embedding_dim = self.spec.shape

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        ids = torch.as_tensor(input_ids).cpu()
        if ids.is_floating_point() or (
                ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_embeddings):
            raise ValueError(f"token ids must be whole numbers in [0, {self.num_embeddings})")
        self.check_files()
        unique, index = ids.unique(return_inverse=True)
        rows = [_read_row(self.spec, self.files[self.spec.name], i) for i in unique.tolist()]
        table = torch.stack(rows) if rows else torch.empty(0, self.embedding_dim, dtype=self.spec.dtype)
        return self._value(self.looked_up, torch.nn.functional.embedding(index, table))

    def _value(self, node: Any, looked_up: torch.Tensor) -> Any:
        """Run the graph on gathered rows, a scale for instance."""
        if node is self.lookup:
            return looked_up
        if not isinstance(node, fx.Node):
            return node
        if node.op == "placeholder":
            return self.constants[cast(str, weight_name(node))]
        assert callable(node.target)
        return node.target(*(self._value(arg, looked_up) for arg in node.args), **node.kwargs)


def _leads_to(node: fx.Node, end: fx.Node) -> bool:
    return node is end or any(_leads_to(node, operand) for operand in end.all_input_nodes)


def _read_row(spec: WeightSpec, file: FileSlice, row: int) -> torch.Tensor:
    """Row [H] of an embedding in its file, dequantized if it is stored packed."""
    nbytes, stored = file.nbytes // spec.shape[0], spec.stored
    dtype, width = (spec.dtype, spec.shape[1]) if stored is None else (torch.uint8, nbytes)
    found = read_tensor(TensorRecord(spec.name, file.path, file.offset + row * nbytes, nbytes, dtype, (width,)))
    if stored is None:
        return found
    return dequantize_rows(found[None], stored.in_features, stored.bits, stored.group_size, stored.scale_dtype,
                           stored.dtype, stored.transposed, stored.symmetric)[0]
