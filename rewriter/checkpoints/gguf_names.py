"""Which parameter of a transformers model a GGUF tensor is, by name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

# Endings of names for which llama.cpp's converter maps another name, by what that is.
SPELLINGS = (
    (".dt_bias", ".dt_proj.bias"), (".dt_bias", ".dt.bias"), (".sinks", ".sinks.weight"),
    ("e_score_correction_bias", "e_score_correction.bias"), (".expert_bias", ".expert_bias.bias"),
    (".correct_output_scale", ".correct_output_scale.weight"), (".layer_scalar", ".layer_scalar.weight"),
    (".router.weight", ".router.layer.weight"), (".shared_mlp.output_linear.weight", ".mlp.down_proj.weight"),
)
SCALES = {".router.scale": "ffn_gate_inp.scale", ".router.per_expert_scale": "ffn_down_exps.scale"}  # in no table
BACKBONE = ("nemotron_h", "nemotron_h_moe")  # whose published checkpoints call the model so


def parameter_names(parameters: Mapping[str, Any], architecture: str, layers: int, stored: Collection[str]
                    ) -> dict[str, str]:
    """The parameter's name by that of each tensor, for tensors that are `stored` and are one parameter."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    mapped = get_tensor_name_map(arch, layers)
    found: dict[str, str] = {}
    for name in parameters:
        own = next((tensor for ending, tensor in SCALES.items() if name.endswith(ending)), None)
        if own is not None:
            found[f"blk.{name.split('.layers.')[1].split('.')[0]}.{own}"] = name
        for spelling in _spellings(name, architecture):
            tensor = mapped.get_name(spelling, try_suffixes=(".weight", ".bias"))
            if tensor is not None and tensor in stored:
                found.setdefault(tensor, name)
                break
    return found


def _spellings(name: str, architecture: str) -> Iterator[str]:
    if architecture in BACKBONE:
        name = name.replace("model.layers.", "backbone.layers.", 1)
    if architecture == "kimi-linear":
        name = name.replace(".forget_gate.", ".", 1)
    yield name
    for ending, other in SPELLINGS:
        if name.endswith(ending):
            yield name.removesuffix(ending) + other
