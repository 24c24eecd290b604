"""Acceptance of a model's drafts, kept in the cache folder for the next process."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

from forebay.kernels.build.cache_folder import cache_folder, make_cache_folder

KNOWN = 64  # checked tokens that weigh as much as the assumption
MOST = 2048  # checked tokens that are kept: of more, the older ones weigh less and less


class DraftsSeen:
    """Accepted and refused tokens that one model drafted for another, both named by their fingerprints, each where all
    earlier ones were accepted. `assumed` is the share that stands before any was checked. A cache folder that cannot be
    read or written is done without."""

    def __init__(self, model: str, draft: str, assumed: float) -> None:
        self.assumed = assumed
        self._key = hashlib.sha256(f"{model} {draft}".encode()).hexdigest()[:24]
        self.right = self.wrong = 0.0
        self._read()

    @property
    def known(self) -> int:
        """Tokens that were checked, of those that are kept."""
        return round(self.right + self.wrong)

    @property
    def chance(self) -> float:
        """The share of drafted tokens that stand where all before them do."""
        return (KNOWN * self.assumed + self.right) / (KNOWN + self.right + self.wrong)

    def __str__(self) -> str:
        assumed = f"{100 * self.assumed:.0f} %"
        return f"{assumed} are assumed" + (f", and {self.known} were checked" if self.known else "")

    def add(self, right: int, wrong: int) -> None:
        """Count tokens of an answer, beside what other processes have counted meanwhile."""
        if not right + wrong:
            return
        self._read()
        self.right, self.wrong = self.right + right, self.wrong + wrong
        share = min(1.0, MOST / (self.right + self.wrong))
        self.right, self.wrong = self.right * share, self.wrong * share
        path = self._path()
        begun = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            make_cache_folder()
            path.parent.mkdir(exist_ok=True)
            begun.write_text(json.dumps({"right": self.right, "wrong": self.wrong}))
            begun.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                begun.unlink(missing_ok=True)

    def _path(self) -> Path:
        return cache_folder() / "drafts" / f"{self._key}.json"

    def _read(self) -> None:
        """Take what is kept; where nothing is that can be read, what this process knows stays."""
        try:
            kept = json.loads(self._path().read_text())
            right, wrong = float(kept["right"]), float(kept["wrong"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return
        if right >= 0 and wrong >= 0 and right + wrong <= MOST + 1:
            self.right, self.wrong = right, wrong
