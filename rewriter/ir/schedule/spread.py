"""Which of several equal things lie on which tier."""

from __future__ import annotations

from collections.abc import Iterator


def spread_tiers(total: int, tier: str, device: int, host: int) -> Iterator[str]:
    """The tier of each of so many, of which some lie on the device and in host memory and all others on `tier`: in
    order each is on the tier that is furthest behind its share."""
    shares = {"device": device, "host": host}
    shares[tier] = shares.get(tier, 0) + total - sum(shares.values())
    done = dict.fromkeys(shares, 0)
    for turn in range(total):
        furthest = max((t for t in shares if done[t] < shares[t]),
                       key=lambda t: (shares[t] * (turn + 1) / total - done[t], t))
        done[furthest] += 1
        yield furthest
