"""Captured graphs that were read from a file: sizes of their inputs as stored, and from them a value for every node."""

from __future__ import annotations

from forebay.rewriter.ir.graph import CapturedModel
from forebay.rewriter.ir.symbolic_values import fill_graphs

STORED = "stored_sizes"  # in the meta of a placeholder that was read: its dtype, and its shape with "B", "S" and "L"


def fill_values(captured: CapturedModel) -> None:
    """Give every node of a model that was read the `meta["val"]` that capture gives, of symbolic sizes; passes over
    captured graphs look at it. Raises what an operation raises that does not run on its operands."""
    fill_graphs((*captured.blocks().values(), captured.step), lambda node: node.meta[STORED])
