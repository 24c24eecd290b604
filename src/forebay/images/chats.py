"""Chats with images and videos as prompts of one model, and what the vision tower gives of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forebay.commands.chat_template import ChatTemplate
from forebay.commands.prompts import BadPrompt
from forebay.images.open_tower import model_type, takes_images, text_alone
from forebay.images.parts import IMAGE, BadPart, take_media
from forebay.images.processor import load_processor, media_prompt, open_image
from forebay.images.videos import open_video

if TYPE_CHECKING:
    from forebay.runtime.run.step_inputs import PromptFeatures
    from forebay.step_model import StepModel

Chat = Iterable[Mapping[str, Any]]


class ImageChats:
    """Chats whose messages have images and videos as parts.

    Args:
        folder: The model's, with its processor, which is loaded with the first image.
        template: The model's.
        files: Whether images and videos may be files of this machine; else data URLs alone.
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
            messages: Of the chat; their images and videos are opened.
            told: What the chat template is given with them.

        Returns:
            As `media_prompt`.

        Raises:
            BadPrompt: An image or a video cannot be read, or the template or the processor refuses the chat.
        """
        try:
            plain, media = take_media(messages)
        except BadPart as error:
            raise BadPrompt(str(error)) from error
        return self.ids(plain, [self.open(part) for part in media], told)

    def open(self, part: Mapping[str, Any]) -> Any:
        """Open the image or the video of a part, as `read_parts` gives it; BadPrompt where that cannot be."""
        if not takes_images(self.folder):
            raise BadPrompt(text_alone(model_type(self.folder), f"{part['type']}s"))
        return open_image(part[IMAGE], self.files) if part["type"] == IMAGE else open_video(
            part, self.processor, self.files)

    def ids(
        self, messages: Chat, media: Sequence[Any], told: dict[str, Any] | None = None
    ) -> tuple[list[int], dict[str, torch.Tensor]]:
        """Read a chat whose images and videos are open, as `media_prompt` does."""
        return media_prompt([*messages], media, self.processor, self.template, told)

    def features(
        self, lm: StepModel, messages: Chat, told: dict[str, Any] | None, budget_nbytes: int
    ) -> PromptFeatures:
        """Compute what stands for the image tokens of a chat, within memory beside that of steps; raises as `read` and
        `prompt_features` do."""
        from forebay.images.prompts import prompt_features

        ids, given = self.read(messages, told)
        return prompt_features(lm, ids, given, budget_nbytes)
