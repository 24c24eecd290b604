"""Methods of modules that scripts call before they generate: the model where that changes nothing, else why not."""

from __future__ import annotations

from typing import Any, Self

import torch

from forebay.kernels.operator import HOST_MEMORY
from forebay.rewriter.one_thread import ONE_THREAD
from forebay.rewriter.planning.options import OPTIONS, nearest

_WEIGHTS = ("its weights lie where the plan puts them, most of them in files: look at the module before it is wrapped, "
            "or at `plan.weights`")
_PARTS = "no module of it runs, but a plan: look at the module before it is wrapped, or at `explain()`"
_SAVING = "it writes no checkpoint: save the module before it is wrapped, or write a bundle with `forebay.export`"
_TRAINING = "it only predicts: train the module before it is wrapped"
_ABSENT = {
    **dict.fromkeys(("parameters", "named_parameters", "buffers", "named_buffers", "state_dict",
                     "load_state_dict", "get_parameter", "get_buffer", "num_parameters", "get_memory_footprint",
                     "get_output_embeddings", "resize_token_embeddings", "tie_weights"), _WEIGHTS),
    **dict.fromkeys(("modules", "named_modules", "children", "named_children", "get_submodule", "apply", "compile",
                     "register_forward_hook", "register_forward_pre_hook", "model", "lm_head", "transformer",
                     "get_decoder", "get_base_model"), _PARTS),
    **dict.fromkeys(("_modules", "_parameters"), "it is no torch module, as Trainer and accelerate ask for: loop over "
                    "`lm(**batch).loss` instead"),
    "generate_batch": "give `generate` all prompts: with `wrap(batch_slots=…)` they enter as others end",
    **dict.fromkeys(("save_pretrained", "push_to_hub"), _SAVING),
    **dict.fromkeys(("requires_grad_", "zero_grad", "gradient_checkpointing_enable", "enable_input_require_grads",
                     "add_adapter", "load_adapter"), _TRAINING),
}
_ELSEWHERE = {
    **dict.fromkeys(("device_map", "max_memory", "offload_folder", "offload_state_dict", "low_cpu_mem_usage"),
                    "the plan says where weights lie, within the budget: leave it out"),
    **dict.fromkeys(("torch_dtype", "dtype"), "the model computes in the dtype that its checkpoint is stored in: leave "
                    "it out, or give one that `forebay quantize MODEL OUT --weights native --dtype bfloat16` (or keep, "
                    "of a GGUF file) has written"),
    **dict.fromkeys(("load_in_8bit", "load_in_4bit", "quantization_config"), "give a checkpoint that `forebay "
                    "quantize` has written"),
    **dict.fromkeys(("attn_implementation", "use_cache", "trust_remote_code", "device"), "leave it out"),
}


def refuse_options(unknown: list[str]) -> None:
    """TypeError for keywords of `wrap` that are no options, with what to do where they are transformers'."""
    for name in unknown:
        said = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else nearest(name, OPTIONS)
        raise TypeError(f"wrap() got an unexpected keyword argument {name!r}{said}")


class NnModuleCompat:
    """`eval`, `to` and their like for a model whose dtype is the checkpoint's, and whose slots are the plan's."""

    training = False

    def __getattr__(self, name: str) -> Any:
        """AttributeError, with what to do where scripts expect what modules have."""
        said = f": {_ABSENT[name]}" if name in _ABSENT else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{said}", name=name, obj=self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a wrapped model cannot be copied, pickled or sent to another process: wrap the model's folder "
                        "again where it is to run")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the model computes."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """The device of token ids and results, whatever computes."""
        return HOST_MEMORY

    def eval(self) -> Self:
        """The model itself: it only ever predicts."""
        return self

    def train(self, mode: bool = True) -> Self:
        """The model itself for `train(False)`; ValueError otherwise."""
        if mode:
            raise ValueError("this model only predicts; train the module before it is wrapped")
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """The model itself where device and dtype, given as to a module, are its own; ValueError otherwise."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type != self.device.type:
            raise ValueError(f"the model lies where its plan puts it, and takes and gives tensors on the "
                             f"{self.device.type}: leave this call out; a GPU computes where torch finds one")
        if dtype not in (None, self.dtype):
            raise ValueError(f"the model computes in {self.dtype}, as its checkpoint is stored: leave this call out, "
                             f"or give wrap a checkpoint stored in {dtype}")
        return self

    def compute_transition_scores(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The score of each token that `generate` chose, of the `sequences` and `scores` it returned, as transformers
        has it."""
        with ONE_THREAD:
            from transformers import GenerationMixin

        return GenerationMixin.compute_transition_scores(self, *args, **kwargs)  # type: ignore[arg-type]

    @property
    def name_or_path(self) -> str:
        lm: Any = self
        return str(lm.checkpoint.folder)

    def can_generate(self) -> bool:
        return True

    def get_input_embeddings(self) -> torch.nn.Module:
        """Return a function that gives the embeddings [..., H] of ids [...], like the model's own, for `inputs_embeds`.
        It reads their rows from the model's files at each call, and keeps none."""
        from forebay.huggingface.token_embeddings import TokenEmbeddings

        lm: Any = self
        return TokenEmbeddings(lm.giving("last", embeds=True).captured, lm.files, lm.check_files)

    def _supports_logits_to_keep(self) -> bool:
        """Return true, which transformers requires of an assistant."""
        return True

    def cpu(self) -> Self:
        return self.to(HOST_MEMORY)

    def cuda(self, device: int | torch.device | None = None) -> Self:
        return self.to("cuda")

    def float(self) -> Self:
        return self.to(torch.float32)

    def half(self) -> Self:
        return self.to(torch.float16)

    def bfloat16(self) -> Self:
        return self.to(torch.bfloat16)
