"""A step between graph and `Program`: launches have their addresses, copies are not yet placed among them."""

from __future__ import annotations

from dataclasses import dataclass, field

from forebay.rewriter.ir.program import FileRows, FileSlice, Item, Span, TensorRef, record


@record
class Move:
    """Copy number i of a step: the bytes of `source` into staging slot `slot`, where they are read at `span`; `room`
    bytes around it may be overwritten by direct reads, unless the bytes pass through a host slot."""

    label: str
    source: FileSlice | Span
    slot: int
    span: Span
    room: tuple[int, int]


@record
class Fetch:
    """Move number `index` is issued here."""

    index: int


@record
class Arrive:
    """From here on launches read what move `index` brought."""

    index: int


@record
class Free:
    """The last launch that reads move `index` stands before this point."""

    index: int


@record
class Lookup:
    """Rows that `source` names are read here into `span`, apart from the moves and in any order with them."""

    index: int
    label: str
    layer: int
    source: FileRows
    span: Span


@record
class Found:
    """From here on launches read what lookup `index` brought."""

    index: int


Mark = Fetch | Arrive | Free | Lookup | Found


@dataclass
class Draft:
    """One step's items with marks where copies concern them. Without `hoist_prefetch` every Fetch stands just before
    its first reader and `prologue` is empty: right, and slow."""

    name: str
    items: list[Item | Mark] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    prologue: tuple[int, ...] = ()  # moves that a step expects to be under way when it starts
    resident: dict[str, Span] = field(default_factory=dict)
    inputs: dict[str, TensorRef] = field(default_factory=dict)
    outputs: dict[str, TensorRef] = field(default_factory=dict)
