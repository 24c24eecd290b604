"""Chats with images as prompts of one model, and what the vision tower gives of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forebay.commands.chat_template import ChatTemplate
from forebay.commands.prompts import BadPrompt
from forebay.images.parts import BadPart, take_sources
from forebay.images.processor import image_prompt, load_processor, open_image

if TYPE_CHECKING:
    from forebay.runtime.run.step_inputs import PromptFeatures
    from forebay.step_model import StepModel

Chat = Iterable[Mapping[str, Any]]


class ImageChats:
    """Chats whose messages have images as parts.

    Args:
        folder: The model's, with its processor, which is loaded with the first image.
        template: The model's.
        files: Whether images may be files of this machine; else data URLs alone.
    """

    def __init__(self, folder: Path, template: ChatTemplate, files: bool = True) -> None:
        self.folder, self.template, self.files = folder, template, files

    @cached_property
    def processor(self) -> Any:
        """The folder's own."""
        return load_processor(self.folder)

    def read(
        self, messages: Chat, told: dict[str, Any] | None = None
    ) -> tuple[list[int], dict[str, torch.Tensor]]:
        """Read a chat.

        Args:
            messages: Of the chat; their images are opened.
            told: What the chat template is given with them.

        Returns:
            As `image_prompt`.

        Raises:
            BadPrompt: An image cannot be read, or the template or the processor refuses the chat.
        """
        try:
            plain, sources = take_sources(messages)
        except BadPart as error:
            raise BadPrompt(str(error)) from error
        return image_prompt(plain, [open_image(source, self.files) for source in sources], self.processor,
                            self.template, told)

    def features(
        self, lm: StepModel, messages: Chat, told: dict[str, Any] | None, budget_nbytes: int
    ) -> PromptFeatures:
        """Compute what stands for the image tokens of a chat, within memory beside that of steps; raises as `read` and
        `prompt_features` do."""
        from forebay.images.prompts import prompt_features

        ids, given = self.read(messages, told)
        return prompt_features(lm, ids, given, budget_nbytes)
