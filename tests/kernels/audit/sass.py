"""Reads a disassembled kernel: the instructions of one turn of its hot loop, and when they wait for device memory.

`parse` reads `nvdisasm -c`. `hot_turn` finds the loop that device memory feeds; loops are those of the control flow, so
code that the compiler moved out of line is none. `exposed_loads` and `turn_time` follow
registers and groups of asynchronous copies from a load to the instruction that needs it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WARP = 32


@dataclass(frozen=True)
class Instruction:
    """One line of SASS: `@guard opcode.modifiers operands`."""

    opcode: str
    modifiers: str = ""  # each with its dot
    operands: str = ""
    guard: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of one thread's access to memory."""
        found = re.search(r"\.(128|64|U16|S16|U8|S8)\b", self.modifiers)
        return {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}[found[1]] if found else 4


@dataclass(frozen=True)
class Listing:
    """A kernel's instructions, and the index of the instruction that each label stands before."""

    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]


@dataclass(frozen=True)
class Turn:
    """The instructions of one turn of the hot loop, or of a whole kernel, in the order in which they stand."""

    body: tuple[Instruction, ...]
    looped: bool
    nested: bool  # another loop is inside, counted as if it ran once

    def nbytes(self, *opcodes: str) -> int:
        """Bytes that a thread loads with these opcodes."""
        return sum(i.nbytes for i in self.body if i.opcode in opcodes)

    def count(self, opcode: str) -> int:
        return sum(i.opcode == opcode for i in self.body)


LABEL = re.compile(r"^\s*(\.L_x_\d+):")
LINE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][A-Z0-9]*)((?:\.\w+)*)\s*(.*?)\s*;")


def parse(listing: str) -> Listing:
    """The instructions and labels of `nvdisasm -c`; ValueError where there is no instruction."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if found := LABEL.match(line):
            labels[found[1]] = len(instructions)
        elif found := LINE.match(line):
            instructions.append(Instruction(found[2], found[3], found[4], found[1] or ""))
    if not instructions:
        raise ValueError("sass: no instruction in the listing")
    return Listing(tuple(instructions), labels)


def _successors(listing: Listing) -> list[tuple[int, ...]]:
    """Instructions that may follow each instruction; a call returns, so what it calls is not part of the flow."""
    following: list[tuple[int, ...]] = []
    last = len(listing.instructions) - 1
    for i, instruction in enumerate(listing.instructions):
        after = (i + 1,) if i < last else ()
        opcode = instruction.opcode
        if opcode == "BRA":
            target = re.search(r"\.L_x_\d+", instruction.operands)
            to = (listing.labels[target[0]],) if target else ()
            conditional = bool(instruction.guard) or re.search(r"\bU?P\w+,", instruction.operands) is not None
            following.append((*to, *after) if conditional or not target else to)
        elif opcode in ("EXIT", "RET") and not instruction.guard:
            following.append(())
        else:
            following.append(after)
    return following


def _blocks(listing: Listing) -> tuple[list[range], list[tuple[int, ...]]]:
    """Basic blocks that are reached from the first, in the order in which they stand, and the blocks after each."""
    following = _successors(listing)
    leaders = {0, *listing.labels.values()}
    for i, to in enumerate(following):
        if to != (i + 1,):
            leaders |= {i + 1, *to}
    starts = sorted(i for i in leaders if i < len(following))
    every = [range(a, b) for a, b in zip(starts, [*starts[1:], len(following)], strict=True)]
    place = {block.start: n for n, block in enumerate(every)}
    after = [tuple(place[i] for i in following[block[-1]]) for block in every]
    reached, waiting = {0}, [0]
    while waiting:
        new = set(after[waiting.pop()]) - reached
        reached |= new
        waiting += new
    kept = sorted(reached)
    renumbered = {old: new for new, old in enumerate(kept)}
    return [every[n] for n in kept], [tuple(renumbered[m] for m in after[n]) for n in kept]


def _loops(after: Sequence[tuple[int, ...]]) -> dict[int, set[int]]:
    """Head of each natural loop -> its blocks: those from which an edge back to a dominating head is reached."""
    before: list[list[int]] = [[] for _ in after]
    for n, to in enumerate(after):
        for m in to:
            before[m].append(n)
    everything = (1 << len(after)) - 1
    dominators = [1, *(everything for _ in after[1:])]  # bit sets
    changed = True
    while changed:
        changed = False
        for n in range(1, len(after)):
            common = everything
            for m in before[n]:
                common &= dominators[m]
            if (found := common | 1 << n) != dominators[n]:
                dominators[n], changed = found, True
    loops: dict[int, set[int]] = {}
    for n, to in enumerate(after):
        for head in to:
            if dominators[n] >> head & 1:
                body = loops.setdefault(head, {head})
                waiting = [n]
                while waiting:
                    if (m := waiting.pop()) not in body:
                        body.add(m)
                        waiting += before[m]
    return loops


def _longest(head: int, body: set[int], blocks: Sequence[range], after: Sequence[tuple[int, ...]]) -> list[int]:
    """Blocks of the longest way from head through body, by instructions, each once: of branches one is taken."""
    best: dict[int, tuple[int, int | None]] = {}  # instructions from here on, the block after
    open_blocks: set[int] = set()
    stack = [(head, iter(after[head]))]
    while stack:
        n, rest = stack[-1]
        open_blocks.add(n)
        further = next((m for m in rest if m in body and m != head and m not in open_blocks and m not in best), None)
        if further is not None:
            stack.append((further, iter(after[further])))
            continue
        ways = [(best[m][0], m) for m in after[n] if m in best and m not in open_blocks]
        length, way = max(ways, default=(0, None), key=lambda found: found[0])
        best[n] = (len(blocks[n]) + length, way)
        open_blocks.remove(n)
        stack.pop()
    path: list[int] = []
    place: int | None = head
    while place is not None:
        path.append(place)
        place = best[place][1]
    return path


def hot_turn(listing: Listing) -> Turn:
    """One turn of the loop that loads most bytes per instruction; without a loop that loads, the whole kernel.

    Loops with bulk copies come before all, then those that multiply on tensor cores (a pass for a norm does not); of
    equals the inner, then the first.
    """
    blocks, after = _blocks(listing)
    loops = _loops(after)

    def turn_of(head: int, body: set[int], looped: bool) -> Turn:
        path = _longest(head, body, blocks, after)
        nested = any(start in path and (start != head or not looped) for start in loops)
        return Turn(tuple(listing.instructions[i] for n in path for i in blocks[n]), looped, nested)

    def loads(turn: Turn) -> bool:
        return any(i.opcode in ("LDG", "LDGSTS", "UTMALDG") for i in turn.body)

    def rank(turn: Turn) -> tuple[bool, bool, float, bool]:
        multiplies = any(i.opcode.endswith("MMA") for i in turn.body)
        per_instruction = turn.nbytes("LDG", "LDGSTS") / len(turn.body)
        return turn.count("UTMALDG") > 0, multiplies, per_instruction, not turn.nested

    turns = [turn_of(head, body, True) for head, body in sorted(loops.items())]
    loading = [turn for turn in turns if loads(turn)]
    return max(loading, key=rank) if loading else turn_of(0, set(range(len(blocks))), False)


STORES = ("STG", "STS", "STL", "STSM", "RED", "LDGSTS")
# Registers of a matrix instruction's operands, by its shape; of HGMMA's, the second matrix lies in shared memory.
MATRICES = {"16816": (4, 2, 4), "1688": (2, 1, 4), "1688.TF32": (4, 2, 4), "1684.TF32": (2, 1, 4)}


def _operands(instruction: Instruction) -> tuple[str, list[str]]:
    """(the register written, "" where there is none; the operands read), predicates in front left out."""
    operands = re.split(r",\s*", instruction.operands)
    while operands and re.fullmatch(r"!?U?P(\d+|T)", operands[0]):
        operands.pop(0)
    compares = instruction.opcode.endswith(("SETP", "SETP2", "PLOP3"))
    if compares or not operands or not re.match(r"R(\d+|Z)\b", operands[0]) or instruction.opcode in STORES:
        return "", operands
    return operands[0], operands[1:]


def _registers(first: str, count: int) -> set[int]:
    found = re.match(r"[-|~]*R(\d+)", first)
    return set(range(int(found[1]), int(found[1]) + count)) if found else set()


def _read(instruction: Instruction) -> set[int]:
    """Numbers of the registers that an instruction reads; of 64-bit arithmetic operands the lower one."""
    _, sources = _operands(instruction)
    read: set[int] = set()
    for operand in sources:
        for found in re.finditer(r"\bR(\d+)(\.64)?", operand):
            read |= {int(found[1]), int(found[1]) + bool(found[2])}
    if instruction.opcode in STORES and instruction.opcode != "LDGSTS" and sources:
        matrices = re.search(r"88\.(\d)", instruction.modifiers)
        read |= _registers(sources[-1], int(matrices[1]) if matrices else max(1, instruction.nbytes // 4))
    elif instruction.opcode == "HMMA":
        shape = instruction.modifiers.split(".")[1] + (".TF32" if "TF32" in instruction.modifiers else "")
        for operand, count in zip(sources, MATRICES.get(shape, (4, 4, 4)), strict=False):
            read |= _registers(operand, count)
    elif instruction.opcode == "HGMMA" and sources:
        read |= _registers(sources[0], 4)
    return read


def _written(instruction: Instruction) -> set[int]:
    """Numbers of the registers that an instruction writes."""
    target, _ = _operands(instruction)
    count = 1
    if instruction.opcode in ("LDG", "LDS", "LDC", "LDL"):
        count = max(1, instruction.nbytes // 4)
    elif instruction.opcode == "LDSM":
        matrices = re.search(r"88\.(\d)", instruction.modifiers)
        count = int(matrices[1]) if matrices else 1
    elif instruction.opcode == "HMMA":
        count = 4
    elif instruction.opcode == "CS2R" or ".WIDE" in instruction.modifiers:
        count = 2
    return _registers(target, count)


def exposed_loads(turn: Turn) -> tuple[int, ...]:
    """Distances, in instructions, of loads into registers whose value is read in the turn that issued them."""
    reads = [_read(i) for i in turn.body]
    distances = []
    for at, instruction in enumerate(turn.body):
        if instruction.opcode == "LDG":
            filled = _written(instruction)
            for k in range(at + 1, len(reads)):
                if reads[k] & filled:
                    distances.append(k - at)
                    break
                filled = filled - _written(turn.body[k])
    return tuple(distances)


def turn_time(turn: Turn, latency: float) -> float:
    """Cycles of a turn of a warp that issues one instruction a cycle and waits for device memory alone.

    A value loaded into registers can be read `latency` cycles later; `DEPBAR.LE SB0, n` waits until all but the last n
    groups of asynchronous copies (LDGDEPBAR ends one) are there. For a loop it is the mean of many turns. Bulk copies
    are waited for in ways that are not followed here.
    """
    loaded: set[int] = set().union(*(_written(i) for i in turn.body if i.opcode == "LDG"))
    events: list[tuple[int, str, set[int], int]] = []  # place, kind, registers, groups left
    for at, instruction in enumerate(turn.body):
        if used := _read(instruction) & loaded:
            events.append((at, "read", used, 0))
        written = _written(instruction)
        if instruction.opcode == "LDG":
            events.append((at, "load", written, 0))
        elif written & loaded:
            events.append((at, "overwrite", written, 0))
        elif instruction.opcode == "LDGDEPBAR":
            events.append((at, "commit", set(), 0))
        elif instruction.opcode == "DEPBAR" and (found := re.match(r"SB0, (0x[0-9a-f]+)", instruction.operands)):
            events.append((at, "wait", set(), int(found[1], 16)))
    ready: dict[int, float] = {}
    groups: list[float] = []
    now = begin = 0.0
    # Pipelines of up to 7 stages come back to the same state after a divisor of 420 turns.
    first, turns = (16, 420) if turn.looped else (0, 1)
    for number in range(first + turns):
        if number == first:
            begin = now
        passed = 0
        for at, kind, registers, left in events:
            now += at - passed
            passed = at
            if kind == "read":
                now = max(now, *(ready.get(r, 0.0) for r in registers))
            elif kind == "load":
                ready |= dict.fromkeys(registers, now + latency)
            elif kind == "overwrite":
                ready = {r: then for r, then in ready.items() if r not in registers}
            elif kind == "commit":
                groups.append(now + latency)
            elif len(groups) > left:
                now = max(now, groups[-left - 1])
        now += len(turn.body) - passed
    return (now - begin) / turns
