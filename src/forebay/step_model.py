"""The part of a model that generation, caches, scores and drafts ask for; `LanguageModel` has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

    from forebay.images.modalities import Modality, TowerFeatures
    from forebay.images.tower import ImageTower

OnToken = Callable[[torch.Tensor], None]


class StepModel(Protocol):
    """A model whose steps can be run; its methods are described at `LanguageModel`."""

    captured: CapturedModel
    checkpoint: Checkpoint
    files: dict[str, FileSlice]
    plan: Plan
    options: Options
    tally: WorkDone
    shared_draft: SharedDraft | None
    drafts_seen: DraftRecord | None

    @property
    def helper(self) -> StepModel | None: ...

    @property
    def config(self) -> PreTrainedConfig: ...

    @property
    def generation_config(self) -> GenerationConfig: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def loaded(self) -> bool: ...

    def close(self) -> None: ...

    def turn(self, call: ModelCall) -> AbstractContextManager[None]: ...

    def refuse_within(self, name: str) -> None: ...

    @property
    def tower(self) -> ImageTower: ...

    def image_features(
        self, given: Mapping[str, torch.Tensor], call: ModelCall
    ) -> dict[Modality, TowerFeatures]: ...

    def giving(self, gives: Gives, embeds: bool = False) -> StepModel: ...

    def reserve(
        self, batch: int, prompt: int, new_tokens: int, continuous: bool = False, *, call: ModelCall | None = None
    ) -> None: ...

    def running(
        self, batch: int, prompt: int, new_tokens: int, continuous: bool = False, *, call: ModelCall | None = None
    ) -> AbstractContextManager[Session]: ...

    def hold(self, rows: SequenceRows) -> None: ...

    def holds(self, rows: SequenceRows) -> bool: ...

    def resuming(self, rows: SequenceRows, call: ModelCall) -> AbstractContextManager[None]: ...
