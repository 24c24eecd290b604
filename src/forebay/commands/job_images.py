"""Images in the lines of a job: their tokens, and the part of the budget that is for the vision tower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from forebay.commands.chat_template import ChatTemplate
from forebay.commands.prompts import Prompt, PromptLine
from forebay.images.chats import ImageChats

if TYPE_CHECKING:
    from forebay.language_model import LanguageModel
    from forebay.rewriter.ir.plan import Budget
    from forebay.rewriter.machine.profile import Machine
    from forebay.rewriter.planning.options import Options
    from forebay.runtime.run.step_inputs import PromptFeatures

SLACK = 1.125  # of what the images with most pixels take: others may be of another form


class JobImages:
    """The images of a job.

    Attributes:
        nbytes: Of the budget, for the tower and its activations while other prompts decode.
    """

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        self.chats, self.nbytes = ImageChats(folder, ChatTemplate(tokenizer)), 0
        self._largest: PromptLine | None = None
        self._most = 0

    def ids(self, request: PromptLine) -> list[int]:
        """Token ids of a line's messages; BadPrompt where there are none."""
        ids, given = self.chats.read(request.messages or (), request.template)
        nbytes = sum(value.nbytes for value in given.values())
        if nbytes > self._most:
            self._most, self._largest = nbytes, request
        return ids

    def reserve(
        self, opened: tuple[Any, Any, Any], sizes: Budget, options: Options, prompts: Sequence[Prompt]
    ) -> tuple[Budget, Options]:
        """Take memory for the images with most pixels out of the budget; what is left, and the options of its plan.

        Raises:
            ValueError: The model takes no images under these options.
            PlanError: The budget has no room for the tower, or for these images.
        """
        from forebay.images.open_tower import image_options, open_tower
        from forebay.rewriter.checkpoints.config import read_config
        from forebay.rewriter.ir.byte_sizes import format_nbytes
        from forebay.rewriter.ir.plan import PlanError

        captured, checkpoint, _ = opened
        options = image_options(options, captured, max(len(prompt.ids) for prompt in prompts))
        if self._largest is None:
            return sizes, options
        machine = cast("Machine", options.machine)
        tower = open_tower(read_config(checkpoint.folder), checkpoint, captured, options, machine.kind)
        _, given = self.chats.read(self._largest.messages or (), self._largest.template)
        try:  # in as many parts as leave half of the budget to the steps
            tower.features(given, sizes.device // 2)
        except PlanError:
            tower.features(given, sizes.device)
        self.nbytes = int(tower.least_nbytes * SLACK)
        if self.nbytes >= sizes.device:
            raise PlanError(f"budget: the images of line {self._largest.line} need {format_nbytes(self.nbytes)} while "
                            f"other prompts decode, and the budget is {format_nbytes(sizes.device)}; give more")
        return replace(sizes, device=sizes.device - self.nbytes), options

    def features(self, lm: LanguageModel, prompt: Prompt) -> PromptFeatures:
        """Return the features of a prompt's image tokens."""
        request = prompt.request
        return self.chats.features(lm, request.messages or (), request.template, self.nbytes)

    def close(self) -> None:
        self.chats.template.close()
