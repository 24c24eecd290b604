"""Models that were published with their numbers but no config.json, as Pope et al. partition them."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.rewriter.predict.model_shapes import ModelShape, decoder_shape


@dataclass(frozen=True)
class PublishedShape:
    """A model, and whether its blocks compute attention and feed-forward side by side. `parameters` are those that its
    MFU counts, without padded heads."""

    model: ModelShape
    parallel: bool
    parameters: float


def palm(name: str, parameters: float, layers: int, hidden: int, heads: int, *, kv_heads: int = 1,
         head_dim: int = 256) -> PublishedShape:
    """PaLM (Chowdhery et al. 2022, Table 1): gated feed-forward of four times the hidden size, 256k tokens, tied."""
    model = decoder_shape(name, layers=layers, hidden=hidden, intermediate=4 * hidden, heads=heads, kv_heads=kv_heads,
                          vocab=256000, head_dim=head_dim, gated=True, tied=True, dtype="bfloat16")
    return PublishedShape(model, True, parameters)


# PaLM 540B's 48 heads are padded to 64 (Pope et al., section 4); MT-NLG: their Table D.1, and its own vocabulary.
PUBLISHED_SHAPES = {
    "palm-8b": palm("palm-8b", 8e9, 32, 4096, 16), "palm-62b": palm("palm-62b", 62e9, 64, 8192, 32),
    "palm-540b": palm("palm-540b", 540e9, 118, 18432, 64),
    "mt-nlg-530b": PublishedShape(decoder_shape(
        "mt-nlg-530b", layers=105, hidden=20480, intermediate=81920, heads=128, kv_heads=128, vocab=51200,
        head_dim=160, gated=False, tied=True, dtype="bfloat16"), False, 530e9)}
