"""Latent attention: what prompts attend to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Latents:
    """Steps over prompts make keys and values of cached latents where they are `expanded`, some rows at a time, and
    else attend to latents as decode steps do. Expanding costs operations for each cached row, and saves more for each
    query that meets it."""

    expanded: bool = False
