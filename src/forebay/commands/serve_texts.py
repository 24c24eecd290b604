"""`forebay serve` for models that make embeddings or score documents."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.commands.terminal import JobError, say

if TYPE_CHECKING:
    from forebay.embedding.embedder import TextModel
    from forebay.rewriter.ir.plan import Budget
    from forebay.serving.app import ServingOptions


def reads_texts(folder: Path) -> bool:
    """Return whether the model of a folder makes embeddings or scores, not text."""
    from forebay.embedding.reranker import is_reranker
    from forebay.embedding.sentence_files import is_embedder

    return is_embedder(folder) or is_reranker(folder)


def refuse_embedders(folder: Path) -> None:
    """JobError for a folder of a model that makes embeddings, where text is asked for."""
    from forebay.embedding.sentence_files import is_embedder

    if is_embedder(folder):
        raise JobError(f"{folder} makes embeddings, not text: forebay embed writes them, forebay serve sends them")


def serve_texts(folder: Path, sizes: Budget, at: socket.socket, options: ServingOptions, grace_s: float) -> None:
    """Serve the model of a folder at a bound socket, until a signal."""
    from forebay.embedding.embedder import Embedder
    from forebay.embedding.reranker import Reranker
    from forebay.embedding.sentence_files import is_embedder
    from forebay.serving.text_models import TextServerRun

    model: TextModel = Embedder(folder, sizes) if is_embedder(folder) else Reranker(folder, sizes)
    way = "/v1/embeddings" if isinstance(model, Embedder) else "/v1/rerank"
    host, port = at.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    TextServerRun(model, options, grace_s).run(
        at, lambda: say(f"serving {options.name} at http://{shown}:{port}{way}"))
    say("stopped")
