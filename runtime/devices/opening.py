"""The arguments with which every device is opened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forebay.rewriter.switches import Switches
from forebay.runtime.disk.reader import DiskReader
from forebay.runtime.disk.spill import SpillSpace
from forebay.runtime.run.trace import Trace


@dataclass(frozen=True)
class Opening:
    """Readers of weights, of caches and of single rows; spill files; the switches; the trace, if any; whether
    reads from disk land in the memory of the device."""

    reader: DiskReader
    loads: DiskReader
    lookups: DiskReader
    spill: SpillSpace
    switches: Switches
    trace: Trace | None = None
    reads_land: bool = True

    def shared(self) -> dict[str, Any]:
        """Arguments of a `StreamedDevice` besides the reader of weights."""
        return {"lookups": self.lookups, "loads": self.loads, "spill": self.spill, "trace": self.trace,
                "poison": self.switches.poison, "sync": self.switches.sync}
