"""What scripts written for modules call before they generate: the model where that changes nothing, else why not."""

from __future__ import annotations

from typing import Any, Self

import torch


class ModuleHabits:
    """`eval`, `to` and their like for a model whose dtype is the checkpoint's, and whose places are the plan's."""

    training = False

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Where token ids are expected and results lie, whatever computes."""
        raise NotImplementedError

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

    def cpu(self) -> Self:
        return self.to("cpu")

    def cuda(self, device: int | torch.device | None = None) -> Self:
        return self.to("cuda")

    def float(self) -> Self:
        return self.to(torch.float32)

    def half(self) -> Self:
        return self.to(torch.float16)

    def bfloat16(self) -> Self:
        return self.to(torch.bfloat16)
