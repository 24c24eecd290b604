"""Operations as they are counted wherever a rate or a measurement is in operations per second."""

from __future__ import annotations


def attention_flops(batch: float, heads: int, queries: float, tokens: float, head_dim: float, window: int = 0) -> float:
    """Operations of two products per query and token that it sees: itself and those before it, the last of `queries`
    all `tokens`, and with a `window` no more than that many."""
    seen_twice = queries * (2 * tokens - queries + 1)
    if window and tokens > window:  # the last queries see so many tokens too few
        late = min(queries, tokens - window)
        seen_twice -= late * (2 * (tokens - window) - late + 1)
    return 2 * batch * heads * head_dim * seen_twice


def expansion_flops(batch: float, heads: int, tokens: float, rank: int, made: int) -> float:
    """Operations that make keys and values of latents, `made` numbers per head and token."""
    return 2 * batch * heads * tokens * rank * made


def latent_flops(batch: float, heads: int, queries: float, tokens: float, width: int, rank: int, made: int) -> float:
    """Operations of latent attention over rows of `width`, `rank` of them a latent: over the rows as they are, or over
    keys and values made of them, where that is fewer."""
    expanded = attention_flops(batch, heads, queries, tokens, (made + width - rank) / 2)
    return min(attention_flops(batch, heads, queries, tokens, width),
               expanded + expansion_flops(batch, heads, tokens, rank, made))
