"""The null device: Programs are bound and walked, and nothing runs."""

from __future__ import annotations

from collections.abc import Mapping

from forebay.rewriter.ir.program import Item
from forebay.runtime.devices.cpu.device import ThreadDevice
from forebay.runtime.devices.device import Call


class NullDevice(ThreadDevice):
    """Memory that is never touched, and items that do nothing. Outputs stay zero."""

    def open_files(self, files: Mapping[str, int]) -> None:
        """Take no space on the disk."""

    def bind(self, item: Item, launch: Call | None) -> Call | None:
        return None
