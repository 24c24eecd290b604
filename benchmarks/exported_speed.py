"""Tokens per second of exported ONNX models in onnxruntime-genai, beside those that its own builder makes of the same
checkpoint, in turns: `python -m benchmarks.exported_speed [MODEL] [--folder DIR]`. `--json FILE` writes all figures.

Both in float32, and both with 4-bit weights in groups of 32 (ours symmetric, as the builder's are) whose products round
activations to 8 bits, which is what the builder asks for on a CPU. The builder needs `pip install onnx_ir`. The ceiling
is the memory's: bytes of the tensors that a decode step reads over the rate of plain reads of as many.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles

import numpy as np
import onnxruntime_genai as genai
import torch

import forebay
from benchmarks.ceilings import memory_bytes_per_s
from benchmarks.ram_contestants import build_onnx, open_onnx
from forebay.rewriter.checkpoints.quantize import Wish, quantize_model
from forebay.rewriter.checkpoints.resolve import resolve_model

Key = tuple[str, str]  # precision, maker
PRECISIONS = {"float32": "fp32", "4 bits": "int4"}  # and the builder's names of them
TURN = 4  # tokens: the pace of a machine with neighbours changes within seconds


def make(model: Path, folder: Path) -> dict[Key, Path]:
    """The four models, by precision and maker; those that `folder` has are taken as they are."""
    makers = ("forebay", "builder")
    found = {(p, maker): folder / f"{maker}_{name}" for p, name in PRECISIONS.items() for maker in makers}
    for (precision, maker), out in found.items():
        if out.exists():
            continue
        if maker == "builder":
            build_onnx(model, out, PRECISIONS[precision], folder / "cache")
            continue
        if precision == "4 bits":
            quantize_model(model, folder / "packed", Wish("w4g32", (), "symmetric", head=True))
            forebay.export(folder / "packed", out, "onnx", activations="int8")
        else:
            forebay.export(model, out, "onnx")
    return found


def one_round(models: dict[Key, genai.Model], prompt: list[int], new_tokens: int, first: int
              ) -> tuple[dict[Key, float], dict[Key, list[float]]]:
    """Tokens/s of the prompt, and of each turn of the answer behind its first token; number `first` begins."""
    keys = list(models)
    whole = len(prompt) + new_tokens
    prefill: dict[Key, float] = {}
    decode: dict[Key, list[float]] = {key: [] for key in keys}
    generators: dict[Key, genai.Generator] = {}
    for key in _from(keys, first):
        options = genai.GeneratorParams(models[key])
        options.set_search_options(max_length=whole, min_length=whole, do_sample=False)
        generators[key] = genai.Generator(models[key], options)
        began = time.perf_counter()
        generators[key].append_tokens(np.array([prompt], np.int32))
        generators[key].generate_next_token()
        prefill[key] = len(prompt) / (time.perf_counter() - began)
    for turn in range((new_tokens - 1) // TURN):
        for key in _from(keys, first + turn):
            began = time.perf_counter()
            for _ in range(TURN):
                generators[key].generate_next_token()
            decode[key].append(TURN / (time.perf_counter() - began))
    return prefill, decode


def _from(keys: list[Key], first: int) -> list[Key]:
    """Each model begins, and each comes before and behind each neighbour equally often."""
    at = first % len(keys)
    turned = keys[at:] + keys[:at]
    return turned[::-1] if first // len(keys) % 2 else turned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--folder", type=Path, help="keeps the models (default: a temporary one)")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    asked = parser.parse_args()
    checkpoint = resolve_model(asked.model, dequantize=True)
    with tempfile.TemporaryDirectory(dir=checkpoint.parent) as temporary:
        folders = make(checkpoint, asked.folder or Path(temporary))
        torch.set_num_threads(asked.threads)
        rate = memory_bytes_per_s(5)
        models = {key: open_onnx(folder, asked.threads) for key, folder in folders.items()}
        nbytes = {key: sum(p.stat().st_size for p in folder.glob("model.onnx*")) for key, folder in folders.items()}
        prompt = np.random.default_rng(0).integers(3, 400, asked.prompt).tolist()
        prefill: dict[Key, list[float]] = {key: [] for key in models}
        decode: dict[Key, list[float]] = {key: [] for key in models}
        for i in range(asked.rounds):
            of_prompt, of_answer = one_round(models, prompt, asked.new, i)
            for key in models:
                prefill[key].append(of_prompt[key])
                decode[key] += of_answer[key]
    print(f"prompt {asked.prompt}, {asked.new} new tokens, {asked.threads} threads, {asked.rounds} rounds, "
          f"{TURN} tokens in turn")
    for (precision, maker), speeds in decode.items():
        size, first = nbytes[precision, maker], median(prefill[precision, maker])
        print(f"{precision:<8} {maker:<8} {size / 1e6:6.0f} MB  prefill {first:6.0f}  decode {median(speeds):6.1f} "
              f"tokens/s ({min(speeds):.1f} .. {max(speeds):.1f}; {rate / size:.0f} at the memory's rate)")
    if asked.json:
        figures = [{"precision": precision, "maker": maker, "nbytes": nbytes[precision, maker],
                    "prefill_tokens_per_s": prefill[precision, maker], "decode_tokens_per_s": speeds}
                   for (precision, maker), speeds in decode.items()]
        asked.json.write_text(json.dumps({"prompt": asked.prompt, "new": asked.new, "threads": asked.threads,
                                          "models": figures}, indent=1) + "\n")
    for precision in PRECISIONS:
        print(f"{precision}: forebay over builder, turn by turn: prefill {_beside(prefill, precision)}, decode "
              f"{_beside(decode, precision)}")


def _beside(found: dict[Key, list[float]], precision: str) -> str:
    """The median of the ratios, and their quartiles."""
    ratios = [a / b for a, b in zip(found[precision, "forebay"], found[precision, "builder"], strict=True)]
    low, middle, high = quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f} .. {high:.2f})"


if __name__ == "__main__":
    main()
