"""How often each block pass fires in one layer of each family; the table in passes/README.md is this one."""

from __future__ import annotations

from collections import Counter

import pytest
from families import rewritten

PASSES = ("fuse_rms_norm", "fuse_layer_norm", "fuse_rotary", "fuse_swiglu", "fuse_residual")
COUNTS = {
    "llama": (2, 0, 2, 2, 2), "qwen2": (2, 0, 2, 2, 2), "mistral": (2, 0, 2, 2, 2), "qwen3": (4, 0, 2, 2, 2),
    "gemma2": (0, 0, 2, 2, 0), "phi3": (2, 0, 2, 0, 2), "gpt_neox": (0, 2, 2, 1, 1), "opt": (0, 2, 0, 1, 2),
    "gpt2": (0, 2, 0, 0, 0),
}


@pytest.mark.parametrize("family", COUNTS)
def test_each_pass_fires_as_often_as_its_pattern_occurs(family: str) -> None:
    for block in rewritten(family).blocks().values():
        made = Counter(n.meta.get("made_by") for n in block.graph.nodes if n.op == "call_function")
        assert tuple(made[name] for name in PASSES) == COUNTS[family]
