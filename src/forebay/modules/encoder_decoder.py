"""Models with an encoder and a decoder within a budget, with transformers' `generate`."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forebay.default_budget import budget_or_default
from forebay.rewriter.checkpoints.config import read_config, read_generation_config
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.checkpoints.resolve import resolve_model
from forebay.rewriter.ir.files import read_input
from forebay.rewriter.ir.plan import Budget
from forebay.rewriter.one_thread import one_thread

# Model types, whose configs need not say it.
KNOWN = {"t5", "mt5", "umt5", "bart", "mbart", "marian", "m2m_100", "pegasus", "blenderbot", "blenderbot-small",
         "whisper"}
TEXT, SPEECH = "AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq"


def is_encoder_decoder(folder: Path) -> bool:
    """Return whether a folder's model has an encoder and a decoder, by its config alone."""
    try:
        settings = json.loads(read_input(folder / "config.json"))
        return bool(settings.get("is_encoder_decoder")) or settings.get("model_type") in KNOWN
    except (OSError, ValueError, AttributeError, TypeError):  # whoever opens the folder says what is wrong
        return False


@one_thread
def encoder_decoder_class(folder: Path) -> str | None:
    """transformers' class of the model in a folder that has an encoder and a decoder; None for any other folder."""
    try:
        config = read_config(folder)
    except CheckpointError:  # said by who opens it
        return None
    if not getattr(config, "is_encoder_decoder", False):
        return None
    from transformers import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING

    return SPEECH if type(config) in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING else TEXT


class EncoderDecoder:
    """A model that reads its input with an encoder and answers with a decoder: `EncoderDecoder(model, budget=None)`.

    Args:
        model: A folder, or a name on the Hugging Face Hub.
        budget: Bytes for weights, caches and activations, as for `wrap`. None: half of the free memory.

    Raises:
        CheckpointError: for files.
        PlanError: for a budget.
    """

    def __init__(
        self, model: str | os.PathLike[str], budget: Budget | int | str | dict[str, Any] | None = None
    ) -> None:
        from forebay.modules.open_folder import open_streamed  # which loads the code of capture

        self.folder = resolve_model(model)
        auto = encoder_decoder_class(self.folder)
        if auto is None:
            raise CheckpointError(f"{self.folder} holds no model with an encoder and a decoder")
        self.speech, self.budget_nbytes = auto == SPEECH, budget_or_default(budget).device
        self.streamed = open_streamed(self.folder, auto)
        self.streamed.module.generation_config = read_generation_config(self.folder)
        self._turn = threading.Lock()

    @property
    def config(self) -> Any:
        """The model's config."""
        return self.streamed.module.config

    @property
    def generation_config(self) -> Any:
        """Defaults of `generate`."""
        return self.streamed.module.generation_config

    def generate(self, *args: Any, **given: Any) -> Any:
        """Run transformers' `generate` of the model with these arguments, beams and sampling included.

        Raises:
            PlanError: The budget has no room for the weights, or for what is computed of these inputs.
        """
        with self._running():
            return self.streamed.module.generate(*args, **given)

    def __call__(self, *args: Any, **given: Any) -> Any:
        """Run the model's forward."""
        with self._running():
            return self.streamed.module(*args, **given)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """One thread at a time computes, as its memory is the budget."""
        with self._turn, self.streamed.running(self.budget_nbytes, stay=True):
            yield
