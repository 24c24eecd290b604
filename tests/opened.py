"""A checkpoint's parts whose graphs are rewritten, for the many language models of a test file."""

from __future__ import annotations

from pathlib import Path

import forebay.rewriter.pipeline.plan_task as plan_task
from forebay.open_model import open_model
from forebay.rewriter.checkpoints.checkpoint import Checkpoint
from forebay.rewriter.ir.graph import CapturedModel
from forebay.rewriter.ir.program import FileSlice
from forebay.rewriter.switches import Switches


def open_rewritten(folder: Path) -> tuple[CapturedModel, Checkpoint, dict[str, FileSlice]]:
    """As `open_model` gives them; what a language model does to captured graphs first is done once for all."""
    captured, checkpoint, files = open_model(folder)
    return plan_task.rewrite_captured(captured, Switches()), checkpoint, files
