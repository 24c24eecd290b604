"""What the contestants of `benchmarks.offload` open: random models by name, packed, copied, converted, exported."""

from __future__ import annotations

import shutil
import subprocess
import sys
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
    """The forms of one model: `llama` (benchmarks.models), or a GGUF file: `demo`, `demo:Q8_0`, `3b:Q4_0`."""

    def __init__(self, model: str, scratch: Path) -> None:
        self.scratch = scratch
        self.name, _, kind = model.partition(":")
        self.file = gguf_file(self.name, kind, scratch) if kind or self.name not in (*MODELS, "smollm2") else None
        self.kind = kind or "Q4_0"
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

        import forebay
        from forebay.rewriter.checkpoints.quantize import Wish, quantize_model
        from forebay.rewriter.checkpoints.resolve import resolve_model

        sizes = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(file).tensors}
        own = sum(sizes.values()) - (sizes["token_embd.weight"] if "output.weight" in sizes else 0)
        out = self.scratch / f"{file.stem}-{form}"
        if form in ("packed", "half"):
            if form == "packed":
                out = resolve_model(file)
            else:
                quantize_model(file, out, Wish("keep", head=True, embeddings=True, dtype=torch.bfloat16))
            return ModelForm(out, model_nbytes(out) * own // sum(sizes.values()))
        if form == "gguf":
            return ModelForm(file, own)
        native = resolve_model("demo" if self.name == "demo" else file, dequantize=True)
        if form.startswith("exported"):
            model, more = native, {}
            if form == "exported":
                model, more = self.scratch / "symmetric", {"activations": "int8"}
                quantize_model(native, model, Wish("w4g32", (), "symmetric", head=True))
            forebay.export(model, out, "onnx", **more)
        else:
            bits = "fp32" if form.endswith("float32") else "int8" if self.kind == "Q8_0" else "int4"
            build_onnx(native, out, bits, self.scratch / "cache")
        return ModelForm(out, onnx_nbytes(out))


def gguf_file(name: str, kind: str, scratch: Path) -> Path:
    """The demo, as it is in Q4_1 or quantized anew by llama.cpp's own code, or a random model."""
    from forebay.rewriter.checkpoints.resolve import demo_gguf

    if name != "demo":
        return make_gguf(name, kind)
    if not kind:
        return demo_gguf()
    from benchmarks.llama_cpp import load_library
    from benchmarks.perplexity import write_file

    write_file(load_library(), out := scratch / f"demo-{kind}.gguf", kind)
    return out


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
    return model.partition(":")[0] in (*MODELS, "smollm2", "demo", *SHAPES)


def build_onnx(model: Path, out: Path, precision: str, cache: Path) -> None:
    """The model in a precision ("int4") by onnxruntime-genai's own builder."""
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(model), "-o", str(out), "-e", "cpu",
               "-p", precision, "-c", str(cache)]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"the builder failed (it needs: pip install onnx_ir): {ran.stderr.splitlines()[-1]}")


def onnx_nbytes(folder: Path) -> int:
    """Bytes of weights that a token reads: all but a table of embeddings that a lookup alone reads."""
    import onnx

    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    looked_up = {node.input[0] for node in graph.node if node.op_type == "Gather"}
    looked_up -= {name for node in graph.node if node.op_type != "Gather" for name in node.input}
    tables = (tensor for tensor in graph.initializer if tensor.name in looked_up)
    beside = sum(int(entry.value) for tensor in tables for entry in tensor.external_data if entry.key == "length")
    return sum(path.stat().st_size for path in folder.glob("model.onnx*")) - beside
