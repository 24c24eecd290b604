"""What a weight holds that is a table of experts: which parameters of the model its entries are made of."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.kernels.formats.entry_part import Part


@dataclass(frozen=True)
class ExpertTable:
    """What a table holds.

    Attributes:
        count: Experts.
        parts: The parts of an entry.
        sources: The name of the parameter, [count, *part.shape], that has each of them for all experts.
    """

    count: int
    parts: tuple[Part, ...]
    sources: tuple[str, ...]
