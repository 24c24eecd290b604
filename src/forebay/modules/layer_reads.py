"""Reads of a layer's weights on another thread, while the layer before it computes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

Weights = Mapping[int, torch.Tensor]  # by key


class LayerReads:
    """Reads at most one layer ahead of those that are called.

    Args:
        order: The layer that is called after each, as far as it is known; calls correct it.
        read: Reads a layer's weights.

    Attributes:
        ahead: The layer that has been read, or is being read; None: no layer.
        last: The layer that was called last.
    """

    def __init__(self, order: dict[int, int], read: Callable[[int], Weights]) -> None:
        self.ahead: int | None = None
        self.last: int | None = None
        self._order, self._read = order, read
        self._result: Future[Weights] | None = None
        self._thread = ThreadPoolExecutor(1, "layer reads")

    def called(self, layer: int) -> None:
        """Note a call."""
        if self.last is not None:
            self._order[self.last] = layer
        self.last = layer

    def next_of(self, here: Collection[int]) -> int | None:
        """The layer that is called next among those that are not `here`; None where there is none, or it is unknown."""
        found = self.last
        for _ in self._order:
            found = None if found is None else self._order.get(found)
            if found not in here:
                return None if found == self.last else found
        return None

    def begin(self, layer: int) -> None:
        """Begin to read a layer."""
        self.ahead, self._result = layer, self._thread.submit(self._read, layer)

    def take(self) -> Weights:
        """Wait for the layer that is read, and give its weights."""
        assert self._result is not None
        result, self.ahead, self._result = self._result, None, None
        return result.result()

    def close(self) -> None:
        """End the thread, and forget what it read."""
        self._thread.shutdown()
        self.ahead, self._result = None, None
