"""The part of a model that generation, caches, scores and drafts ask for; `LanguageModel` has it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch

from forebay.call_turns import ModelCall
from forebay.rewriter.checkpoints.checkpoint import Checkpoint
from forebay.rewriter.ir.graph import CapturedModel, Gives
from forebay.rewriter.ir.plan import Plan
from forebay.rewriter.ir.program import FileSlice
from forebay.rewriter.ir.shared_draft import DraftRecord, SharedDraft
from forebay.rewriter.planning.options import Options
from forebay.runtime.run.progress import WorkDone
from forebay.runtime.run.rows import SequenceRows
from forebay.runtime.run.session import Session

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig

OnToken = Callable[[torch.Tensor], None]


class StepModel(Protocol):
    """A model whose steps can be run.

    Attributes:
        captured: Its graphs and sizes.
        checkpoint: Its files.
        files: The place of each weight within them.
        plan: The present plan; `reserve` and `running` may put another in its place.
        options: The options with which it is planned anew.
        tally: Steps, tokens and drafts of the last `generate`.
        drafts_seen: The record of its drafts, where it drafts for another model.
    """

    captured: CapturedModel
    checkpoint: Checkpoint
    files: dict[str, FileSlice]
    plan: Plan
    options: Options
    tally: WorkDone
    drafts_seen: DraftRecord | None

    @property
    def helper(self) -> StepModel | None:
        """The model that drafts for this one within the same budget."""

    @property
    def shared_draft(self) -> SharedDraft | None:
        """The step of this model that drafts in its own memory."""

    @property
    def config(self) -> PreTrainedConfig: ...

    @property
    def generation_config(self) -> GenerationConfig: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def turn(self, call: ModelCall) -> AbstractContextManager[None]:
        """Give `call` the memory; RuntimeError in a callback of another call."""

    def giving(self, gives: Gives, embeds: bool = False) -> StepModel:
        """Return this model with steps that give something else, or take embeddings."""

    def reserve(
        self, batch: int, prompt: int, new_tokens: int, in_places: bool = False, *, call: ModelCall | None = None
    ) -> None:
        """Plan for (at least) so many sequences, prompt tokens and new tokens."""

    def running(
        self, batch: int, prompt: int, new_tokens: int, in_places: bool = False, *, call: ModelCall | None = None
    ) -> AbstractContextManager[Session]:
        """Reserve, and give the session."""

    def hold(self, rows: SequenceRows) -> None:
        """Let `resuming` go on with these rows until the session is used for others."""

    def holds(self, rows: SequenceRows) -> bool:
        """Whether `resuming` can go on with these rows."""

    def resuming(self, rows: SequenceRows, call: ModelCall) -> AbstractContextManager[None]:
        """Give the session that holds `rows` to further steps of `call`."""
