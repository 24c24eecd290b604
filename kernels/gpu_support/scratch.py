"""Temporaries that the launches of a stream share; without Triton, so that a device can take them ahead."""

from __future__ import annotations

import weakref

import torch


class Scratch:
    """Temporaries of the launches of one stream, which are through with them one after the other: `values` for any use,
    and `counters`, which are 0 between launches. `version` changes when either is made anew; each call drops the old
    one as it next runs."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.version = device, 0
        self.values = torch.empty(0, dtype=torch.uint8, device=device)
        self.counters = torch.empty(0, dtype=torch.int32, device=device)

    def hold(self, values_nbytes: int, counters: int) -> None:
        """Have room for so many bytes and counters."""
        if self.values.numel() < values_nbytes:
            self.version += 1
            self.values = torch.empty(values_nbytes, dtype=torch.uint8, device=self.device)
        if self.counters.numel() < counters:
            self.version += 1
            self.counters = torch.zeros(counters, dtype=torch.int32, device=self.device)


# By device and stream; a scratch lives as long as a bound call that was made on its stream.
_scratches: weakref.WeakValueDictionary[tuple[torch.device, int], Scratch] = weakref.WeakValueDictionary()


def scratch_of(device: torch.device, stream: int) -> Scratch:
    """The scratch of a stream, by the number that the driver gives it."""
    found = _scratches.get((device, stream))
    if found is None:
        found = _scratches[device, stream] = Scratch(device)
    return found
