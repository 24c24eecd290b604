"""A rank's parts of a graph's weights and caches."""

from __future__ import annotations

from dataclasses import dataclass, field

from forebay.rewriter.ir.share import WeightCut


@dataclass
class Cuts:
    """A rank's parts of a graph's weights and caches: cuts by the weight's name in the graph; by the placeholder of a
    cache or a state the dimension that is cut (`heads`), and what is left of it; `rows` are further placeholders, which
    are rows of another one's weight; `along` are the mesh's axes that each cut dimension of a weight is divided by; of
    weights `in_pieces` there are so many, in their place."""

    weights: dict[str, WeightCut] = field(default_factory=dict)
    along: dict[str, dict[int, tuple[int, ...]]] = field(default_factory=dict)
    heads: dict[str, tuple[int, int]] = field(default_factory=dict)
    rows: dict[str, str] = field(default_factory=dict)
    in_pieces: dict[str, int] = field(default_factory=dict)
