"""A step between graph and `Program`: launches have their addresses, copies are not yet placed among them."""

from __future__ import annotations

from dataclasses import dataclass, field

from forebay.rewriter.ir.program import COMPUTE, FileSlice, Item, Rows, Span, TensorRef, record


@record
class Move:
    """Copy number i of a step: the bytes of `source` into staging slot `slot` of a ring of slots, where they are read
    at `span`; `room` bytes around it may be overwritten by direct reads, unless the bytes pass through a host slot.
    `alike`: rows that are named stand in the slot where they stand in their table, and alone go on from a host slot.
    `computed`: a launch of the step names the rows, so the copy stays after it."""

    label: str
    source: FileSlice | Rows | Span
    slot: int
    span: Span
    room: tuple[int, int]
    ring: str = "slot"  # slots are the buffers slot0, slot1, …; those that the host lends them host_slot0, …
    layer: int = -1
    alike: bool = False
    computed: bool = False


@record
class Outgoing:
    """Store number i of a step: the bytes of `source`, on the device, to `target` in host memory or a spill file.

    `room` bytes behind a target in a file complete its last page. Where copies hop, bytes for a file pass through slot
    `slot` of the host's ring. `keeps`: the source lives on after it has been stored. `alike` as of a move.
    """

    label: str
    source: Rows | Span
    target: Rows | Span
    room: int = 0
    slot: int = 0
    ring: str = "out"  # slots are the buffers host_out0, host_out1, …
    keeps: bool = False
    layer: int = -1
    cache: bool = False  # of a cache that was loaded for its turn
    alike: bool = False


@record
class Fetch:
    """Move number `index` is issued here."""

    index: int


@record
class Arrive:
    """From here on launches of `stream` read what move `index` brought."""

    index: int
    stream: str = COMPUTE


@record
class Free:
    """The last launch that reads move `index`, of `stream`, stands before this point."""

    index: int
    stream: str = COMPUTE


@record
class Store:
    """Store number `index` is issued here: its source is written by launches before this point."""

    index: int


@record
class Evict:
    """From here on the memory that store number `index` reads is used for something else."""

    index: int


@record
class Vacant:
    """From here on slot `slot` of a ring holds nothing: the launches before this point were the last to touch it,
    and the `stores` (by number) that ended before. `number` counts the times."""

    ring: str
    slot: int
    number: int
    stores: tuple[int, ...] = ()


@record
class Lookup:
    """Rows that `source` names are read here into `span`, apart from the moves and in any order with them."""

    index: int
    label: str
    layer: int
    source: Rows
    span: Span


@record
class Found:
    """From here on launches read what lookup `index` brought."""

    index: int


@record
class Exchanged:
    """From here on launches read what the collective `label` gave."""

    label: str


Mark = Fetch | Arrive | Free | Store | Evict | Vacant | Lookup | Found | Exchanged


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
    stores: list[Outgoing] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)  # nbytes of each spill file
