"""Tables of experts: weights whose entries are made of several parameters of the model."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.kernels.formats.entry_part import Part


@dataclass(frozen=True)
class ExpertTable:
    """The content of a table of experts.

    Attributes:
        count: Experts.
        parts: The parts of an entry.
        sources: The name of the parameter, [count, *part.shape], that has each of them for all experts.
        among: Experts that routers pick from, where that is more. Those with larger numbers than the table's have no
            weights, though a parameter may have unused rows for them.
    """

    count: int
    parts: tuple[Part, ...]
    sources: tuple[str, ...]
    among: int = 0
