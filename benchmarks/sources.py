"""What the contestants of `benchmarks.offload` open: random models by name, packed, copied, converted."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu_cases.offloaded import model_nbytes
from benchmarks.models import MODELS, model_folder, packed
from benchmarks.random_gguf import SHAPES, make_gguf


@dataclass(frozen=True)
class ModelForm:
    """Where it is, and the bytes of weights that a token reads (0: they are not counted)."""

    path: Path
    read_nbytes: int = 0


class Sources:
    """The forms of one model: `llama` (benchmarks.models), or a GGUF file: `demo`, `3b:Q4_0`."""

    def __init__(self, model: str, scratch: Path) -> None:
        self.scratch = scratch
        self.name, _, kind = model.partition(":")
        made = kind or self.name not in (*MODELS, "smollm2")
        self.file = gguf_file(self.name, kind or "Q4_0") if made else None
        self.made: dict[str, ModelForm] = {}

    @property
    def folder(self) -> Path:
        """A checkpoint of as many bytes, which plain reads are timed on."""
        return model_folder(self.name) if self.file is None else self.of("packed", "").path

    @property
    def nbytes(self) -> int:
        return self.file.stat().st_size if self.file else model_nbytes(self.folder)

    def of(self, form: str, contestant: str) -> ModelForm:
        """A form of the model, made once; a `copy` is the contestant's own, as it maps the file."""
        key = contestant if form == "copy" else form
        if key not in self.made:
            self.made[key] = self._checkpoint(form, contestant) if self.file is None else self._of_file(form, self.file)
        return self.made[key]

    def _checkpoint(self, form: str, contestant: str) -> ModelForm:
        if form == "copy":
            return ModelForm(Path(shutil.copytree(self.folder, self.scratch / f"{self.folder.name}-{contestant}")))
        return ModelForm(packed(self.folder) if form == "w4" else self.folder)

    def _of_file(self, form: str, file: Path) -> ModelForm:
        """A token reads all weights but the embedding's, whose matrix is the head's too in the demo."""
        import gguf

        from forebay.rewriter.checkpoints.quantize import Wish, quantize_model
        from forebay.rewriter.checkpoints.resolve import resolve_model

        sizes = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(file).tensors}
        own = sum(sizes.values()) - (sizes["token_embd.weight"] if "output.weight" in sizes else 0)
        out = self.scratch / f"{file.stem}-{form}"
        if form == "gguf":
            return ModelForm(file, own)
        if form == "packed":
            out = resolve_model(file)
        else:  # in bf16
            quantize_model(file, out, Wish("keep", head=True, embeddings=True, dtype=torch.bfloat16))
        return ModelForm(out, model_nbytes(out) * own // sum(sizes.values()))


def gguf_file(name: str, kind: str) -> Path:
    """The demo, whose types are its own, or a random model."""
    from forebay.rewriter.checkpoints.resolve import demo_gguf

    return demo_gguf() if name == "demo" else make_gguf(name, kind)


def expert_hits(folder: Path, device: int) -> tuple[float, ...]:
    """Hits of pools of any size on answers that no timed turn gives; measured once, the file lies next to the model."""
    import forebay
    from forebay.calibrate_experts import calibrate_experts
    from forebay.calibration import Calibration

    path, budget = folder / "routing.json", {"device": device, "disk": folder}
    if not path.exists():
        with forebay.wrap(folder, budget, prompt=1, new_tokens=16) as lm:
            answers = [lm.generate(torch.tensor([[100 + i]]), max_new_tokens=16, do_sample=True, top_k=0)[0]
                       for i in range(12)]
        calibrate_experts(folder, answers, budget).save(path)
    return Calibration.load(path).expert_hits


def known(model: str) -> bool:
    """Whether a model may be named so."""
    return model in (*MODELS, "smollm2", "demo") or model.partition(":")[0] in SHAPES
