"""A streamer of transformers' generation that calls `on_token`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers.generation import BaseStreamer


class Listener(BaseStreamer):
    """Hands on each column of new tokens; the first thing a streamer gets is the prompt."""

    def __init__(self, on_token: Callable[[torch.Tensor], None]) -> None:
        self.on_token, self.begun = on_token, False

    def put(self, value: torch.Tensor) -> None:
        if self.begun:
            for column in value.reshape(len(value), -1).T if value.dim() > 1 else (value,):
                self.on_token(column)
        self.begun = True

    def end(self) -> None:
        """Nothing is held back."""
