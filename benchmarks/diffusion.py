"""Diffusion transformers larger than their memory: `python -m benchmarks.diffusion`.

A transformer of PixArt's shape with random weights computes one denoising step at a time: by `torch.compile(model,
backend="forebay")`, and by diffusers' `enable_group_offload` with its groups on the disk. Both run on the CPU, each
in a process of its own, and take turns, so that both meet the same state of the machine. Group offloading comes
first: its peak times `SHARE` is Forebay's budget, because its process also grows outside the budget. `peak` is what a
process grows by during its steps, pages of files included, from where it was before it had the model; a tiny model
was compiled by then. Files leave the page cache before each step, outside its time. glibc gives blocks of a weight's
size back to the system: else weights that group offloading has let go would count. The ceiling is the step of the
same model in memory, which runs last.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # before torch loads OpenMP

import torch

from benchmarks.command import arguments, note, print_table, spread, write_json
from benchmarks.isolated import IsolatedWorker, serve
from benchmarks.probes import processor
from forebay.runtime.disk.page_cache import drop_file

SAMPLE_S = 0.005
SHARE = 0.75
KEPT_NBYTES = 5 << 20  # blocks that glibc keeps: more than activations take, less than matrices
WIDTH, HEADS = 1152, 16  # PixArt's
SHAPE: dict[str, Any] = dict(
    num_attention_heads=HEADS, attention_head_dim=WIDTH // HEADS, in_channels=4, out_channels=8, patch_size=2,
    attention_bias=True, activation_fn="gelu-approximate", num_embeds_ada_norm=1000, caption_channels=64,
    cross_attention_dim=WIDTH, norm_type="ada_norm_single", norm_elementwise_affine=False, norm_eps=1e-6,
    use_additional_conditions=False)
Row = dict[str, Any]


class DiffusionContestant:
    """One way to run the model, in its own process.

    Args:
        name: "forebay", "group offloading" or "in memory".
        folder: For its weights.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.before_nbytes = 0
        self.model: Any = None
        self.inputs: Row = {}

    def prepare(self, layers: int, size: int, threads: int, budget: int) -> Row:
        """Make the model, and run a first step."""
        from diffusers import PixArtTransformer2DModel

        torch.set_num_threads(threads)
        if self.name == "forebay":
            with torch.no_grad():
                torch.compile(torch.nn.Linear(8, 8), backend="forebay", options=self._options(1 << 20))(
                    torch.ones(1, 8))
        _step(PixArtTransformer2DModel(**SHAPE, num_layers=1, sample_size=8).eval(), _inputs(8))
        self.before_nbytes = _resident_nbytes()
        torch.manual_seed(0)
        self.model = PixArtTransformer2DModel(**SHAPE, num_layers=layers, sample_size=size).eval()
        for p in self.model.parameters():
            p.data.normal_(0, p.shape[-1] ** -0.5 if p.dim() == 2 else 0.02)
        self.inputs, weights = _inputs(size), sum(p.nbytes for p in self.model.parameters())
        if self.name == "forebay":
            self.model = torch.compile(self.model, backend="forebay", options=self._options(budget))
        elif self.name == "group offloading":
            self.model.enable_group_offload(
                onload_device=torch.device("cpu"), offload_device=torch.device("cpu"), offload_type="block_level",
                num_blocks_per_group=1, offload_to_disk_path=str(self.folder))
        return {"weights_nbytes": weights, "sum": float(_step(self.model, self.inputs).double().abs().sum())}

    def step(self) -> Row:
        """Time one step."""
        for path in self.folder.glob("*.safetensors"):
            drop_file(path)
        peak, done = _resident_nbytes(), threading.Event()

        def watch() -> None:
            nonlocal peak
            while not done.wait(SAMPLE_S):
                peak = max(peak, _resident_nbytes())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            began = time.perf_counter()
            _step(self.model, self.inputs)
            took = time.perf_counter() - began
        finally:
            done.set()
            watcher.join()
        return {"time_s": took, "peak_nbytes": peak - self.before_nbytes}

    def _options(self, budget: int) -> Row:
        return {"budget": {"device": budget, "disk": str(self.folder)}, "strict": True}


def _inputs(size: int) -> Row:
    draw = torch.Generator().manual_seed(1)
    return dict(hidden_states=torch.randn(1, 4, size, size, generator=draw), timestep=torch.tensor([7]),
                encoder_hidden_states=torch.randn(1, 32, 64, generator=draw),
                added_cond_kwargs={"resolution": None, "aspect_ratio": None})


@torch.no_grad()
def _step(model: Any, inputs: Row) -> torch.Tensor:
    return model(**inputs).sample  # type: ignore[no-any-return]


def _resident_nbytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * sum(int(line.split()[1]) for line in status.splitlines() if line.startswith(("RssAnon", "RssFile")))


def main() -> None:
    args = arguments(__doc__, layers=(10, "layers of the transformer"), size=(32, "height and width of the latents"),
                     steps=(5, "timed steps of each"), threads=(2, "threads of each"),
                     folder=(Path(tempfile.gettempdir()), "folder on the disk that is read"),
                     serve=(str, "name of the contestant that this process is"))
    if args.serve:
        contestant = DiffusionContestant(args.serve, args.folder)
        serve(lambda job: getattr(contestant, job.pop("act"))(**job), stalled_s=600)
        return
    sizes = dict(layers=args.layers, size=args.size, threads=args.threads)
    rows: dict[str, Row] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as kept:
        workers = {name: _worker(name, kept) for name in ("group offloading", "forebay")}
        budget = 0
        for name, worker in workers.items():
            rows[name] = _asked(worker, dict(act="prepare", budget=budget, **sizes)) | {"turns": []}
            note(f"{name}: {rows[name]}")
            first = _asked(worker, {"act": "step"})
            budget = budget or int(SHARE * first["peak_nbytes"])
        for _ in range(args.steps):
            for name, worker in workers.items():
                rows[name]["turns"].append(_asked(worker, {"act": "step"}))
        for worker in workers.values():
            worker.close()
        rows["in memory"] = _asked(worker := _worker("in memory", kept), dict(act="prepare", budget=0, **sizes))
        rows["in memory"]["turns"] = [_asked(worker, {"act": "step"}) for _ in range(args.steps)]
        worker.close()
    table = [{"": name, "s per step": spread(turn["time_s"] for turn in row["turns"]),
              "peak, MB": f"{max(turn['peak_nbytes'] for turn in row['turns']) / 1e6:.0f}"}
             for name, row in rows.items()]
    print_table(table)
    write_json(args, {"processor": processor(), "torch": torch.__version__, "budget_nbytes": budget, **sizes,
                      "contestants": rows})


def _asked(worker: IsolatedWorker, job: Row) -> Row:
    """What a job answers; SystemExit where it failed."""
    found = worker.ask(job)
    if "failed" in found:
        worker.close()
        raise SystemExit(f"{worker.command[-3]}: {found['failed']}; diffusers and accelerate are needed")
    return found


def _worker(name: str, folder: str) -> IsolatedWorker:
    own = Path(folder) / name.replace(" ", "-")
    own.mkdir()
    return IsolatedWorker([sys.executable, "-m", "benchmarks.diffusion", "--serve", name, "--folder", str(own)],
                          {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(KEPT_NBYTES)})


if __name__ == "__main__":
    main()
