"""What torch's CPU allocator hands out."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_allocated(call: Callable[[], object]) -> int:
    """The most bytes that torch's CPU allocator holds at once for `call`, above those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        result = call()
    events = [e for e in watched.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    del result
    return peak
