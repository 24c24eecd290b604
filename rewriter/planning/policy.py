"""FlexGen's policy of six percentages, as options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def placed_by(policy: Sequence[float] | None) -> dict[str, Any]:
    """The options that put things where a policy has them.

    Args:
        policy: Six percentages, as `Options.policy` has them; or None.

    Source:
        FlexGen, section 4.2: wg, wc, cg, cc, hg, hc.
    """
    if policy is None:
        return {}
    placed: dict[str, Any] = {"weight_shares": (policy[0] / 100, policy[1] / 100)}
    for name, (device, host) in (("cache", policy[2:4]), ("hidden", policy[4:])):
        placed[f"{name}_tier"] = "device" if device == 100 else "host" if device + host == 100 else "disk"
        if 0 < device < 100 or (0 < host < 100 - device):
            placed[f"{name}_shares"] = device / 100, 0.0 if device + host == 100 else host / 100
    return placed
