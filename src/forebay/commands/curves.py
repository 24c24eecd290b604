"""Curves of latency against what it buys, as a picture and a file of its data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forebay.rewriter.ir.files import write_text


def draw_curves(curves: Mapping[str, Sequence[tuple[float, float, str]]], axes: tuple[str, str], numbers: str,
                path: Path, data: Sequence[Mapping[str, Any]]) -> None:
    """Points (x, y, what stands beside) of each curve, both axes logarithmic, and JSON beside the picture.

    Raises ValueError for a path whose ending matplotlib cannot write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # draws without a screen
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for name, points in curves.items():
        axis.plot([x for x, _, _ in points], [y for _, y, _ in points], marker="o", label=name)
        for x, y, text in points:
            axis.annotate(text, (x, y), fontsize=6, textcoords="offset points", xytext=(3, 3))
    axis.set(xscale="log", yscale="log", xlabel=axes[0], ylabel=axes[1])
    axis.grid(True, which="both", linewidth=0.3)
    axis.legend(title=f"numbers: {numbers}")
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise ValueError(f"cannot write the picture {path}: {error}") from error
    write_text(path.with_suffix(".json"), json.dumps(list(data), indent=1) + "\n")
