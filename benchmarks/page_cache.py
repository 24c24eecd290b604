"""The page cache as benchmarks see it: what of a model's files is in it, and steps timed with it dropped."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from forebay.runtime.disk.page_cache import drop_file, resident_nbytes

DROP_ALL = Path("/proc/sys/vm/drop_caches")


class PageCache:
    """The model's files in the page cache: how many bytes, and how to drop them."""

    def __init__(self, folders: Sequence[str]) -> None:
        self.paths = [p for folder in folders for p in sorted(Path(folder).glob("*")) if p.suffix in (
            ".safetensors", ".dat")]

    def nbytes(self) -> int:
        return sum(map(resident_nbytes, self.paths))

    def drop(self) -> None:
        try:
            DROP_ALL.write_text("1")
        except OSError:
            for path in self.paths:
                drop_file(path)


class StepClock:
    """Times steps. Before each, outside its time, the files' bytes in `cache`, if given, are counted and dropped."""

    def __init__(self, cache: PageCache | None = None) -> None:
        self.cache = cache
        self.times_s: list[float] = []
        self.tokens: list[list[int]] = []
        self.cached_peak = 0
        self._start = 0.0

    def begin(self) -> None:
        if self.cache is not None and (cached := self.cache.nbytes()):
            if self.times_s:
                self.cached_peak = max(self.cached_peak, cached)
            self.cache.drop()
        self._start = time.perf_counter()

    def end(self, token: torch.Tensor) -> None:
        """`token` [B] is what the step chose."""
        self.times_s.append(time.perf_counter() - self._start)
        self.tokens.append(token.tolist())

    def start(self, tokens: int) -> Callable[[torch.Tensor], None]:
        """Begin the first of so many steps; calling its result with the token of each begins the next."""
        left = tokens

        def on_token(token: torch.Tensor) -> None:
            nonlocal left
            self.end(token)
            left -= 1
            if left:
                self.begin()

        self.begin()
        return on_token
