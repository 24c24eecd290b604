"""Durations as people read them."""

from __future__ import annotations


def format_seconds(seconds: float) -> str:
    """Seconds in a unit that fits: `228 us`, `22.9 ms`, `19.3 s`, `12 min`, `2 h 05 min`."""
    if seconds < 120:
        factor, unit = (1e6, "us") if seconds < 1e-3 else (1e3, "ms") if seconds < 1 else (1, "s")
        value = f"{factor * seconds:.3g}"
        return f"{float(value):g} {unit}"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"
