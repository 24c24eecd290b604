"""Tokens per sequence of the steps in which a prompt is computed."""

from __future__ import annotations

from collections.abc import Collection, Sequence

SHORTEST_CHUNK = 16  # tokens; below this a step over fewer tokens is hardly faster


def chunk_sizes(largest: int, without: Collection[int] = ()) -> tuple[int, ...]:
    """The sizes that prefill steps may have, largest first, but for those that are others': two to each halving, so
    that a short prompt wastes at most a third."""
    sizes = {largest}
    n = largest
    while n // 2 >= SHORTEST_CHUNK:
        sizes |= {-(-3 * n // 4), n // 2}
        n //= 2
    return tuple(sorted(sizes - {*without}, reverse=True))


def chunk_steps(prompt: int, sizes: Sequence[int]) -> dict[int, int]:
    """Return how many steps of which of these sizes, largest first, a prompt takes: what is left behind whole chunks
    has the smallest that holds it."""
    whole, rest = divmod(prompt, sizes[0])
    found = {sizes[0]: whole} if whole else {}
    if rest:
        last = min(size for size in sizes if size >= rest)
        found[last] = found.get(last, 0) + 1
    return found


def halvings(n: int) -> list[int]:
    """n, its half, the half of that, rounded up, and so on until 1."""
    found = []
    while n >= 1:
        found.append(n)
        n = -(-n // 2) if n > 1 else 0
    return found
