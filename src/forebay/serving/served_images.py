"""Images in requests to a server: computed by the vision tower, one request at a time, while others decode."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forebay.commands.terminal import JobError
from forebay.images.chats import ImageChats
from forebay.rewriter.ir.plan import PlanError
from forebay.serving.refusal import Refusal

if TYPE_CHECKING:
    from forebay.language_model import LanguageModel
    from forebay.runtime.run.step_inputs import PromptFeatures


class ServedImages:
    """The images of a server's requests. For use from several threads.

    Args:
        lm: The model, whose steps take embeddings.
        chats: Reads messages with images, by a template that nobody else renders.
        nbytes: Memory for the tower, beside the budget of the model's plan.
    """

    def __init__(self, lm: LanguageModel, chats: ImageChats, nbytes: int) -> None:
        self.lm, self.chats, self.nbytes = lm, chats, nbytes
        self._lock = threading.Lock()

    def ids(self, messages: Sequence[dict[str, Any]], told: dict[str, Any]) -> list[int]:
        """Token ids of a chat; BadPrompt where there are none."""
        with self._lock:  # one process renders
            return self.chats.read(messages, told)[0]

    def features(self, messages: Sequence[dict[str, Any]], told: dict[str, Any]) -> PromptFeatures:
        """Return the features of a chat's image tokens; Refusal (400) for images that cannot be computed."""
        try:
            with self._lock:
                return self.chats.features(self.lm, messages, told, self.nbytes)
        except (JobError, PlanError, ValueError) as error:
            raise Refusal(400, f"images: {error}", "messages") from error
