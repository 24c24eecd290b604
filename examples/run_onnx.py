"""Answer prompts with an exported ONNX model in onnxruntime alone: python examples/run_onnx.py FOLDER "PROMPT" …

The folder is what `forebay export MODEL FOLDER --format onnx` wrote; needs onnxruntime, numpy and tokenizers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime


def exported(folder: Path) -> dict[str, Any]:
    """What export.json says of a folder that was exported for here; ValueError for another."""
    known = folder / "export.json"
    said = json.loads(known.read_text()) if known.is_file() else {}
    if said.get("format") != "onnx" or not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no language model as ONNX: write one with forebay export MODEL OUT --format "
                         "onnx")
    return dict(said)


def generate(folder: str | Path, prompts: Sequence[Sequence[int]], new_tokens: int) -> np.ndarray:
    """Greedy tokens int64 [len(prompts), new_tokens] that follow prompts of any lengths but 0."""
    if not all(len(p) for p in prompts) or not prompts:
        raise ValueError("a prompt has no token: give each at least one")
    dialect = exported(Path(folder))["dialect"]
    options = onnxruntime.SessionOptions()
    session = onnxruntime.InferenceSession(str(Path(folder) / "model.onnx"), options, ["CPUExecutionProvider"])
    lengths, rows = np.array([len(p) for p in prompts]), np.arange(len(prompts))
    width = int(lengths.max())
    # GroupQueryAttention wants prompts at the left, where what is written behind a short one is overwritten later; the
    # standard Attention appends for all alike: at the right there
    left, static = dialect != "standard", dialect == "static"
    batch_slots = [slice(0, n) if left else slice(width - n, width) for n in lengths]
    ids, mask = np.zeros((2, len(prompts), width), np.int64)
    for row, place in enumerate(batch_slots):
        ids[row, place], mask[row, place] = prompts[row], 1
    positions = np.tile(np.arange(width), (len(prompts), 1)) if static else np.maximum(mask.cumsum(1) - 1, 0)
    last = lengths - 1 if left else np.full(len(prompts), width - 1)
    room = width + new_tokens if static else 0  # caches that a step writes into have their length from the beginning
    cache = {i.name: np.zeros((len(prompts), i.shape[1], room, i.shape[3]), np.float32)
             for i in session.get_inputs() if i.name.startswith("past_key_values")}
    names, found = [o.name for o in session.get_outputs()], []
    for step in range(new_tokens):
        feeds = {"input_ids": ids, "position_ids": positions}
        if static:
            made = {"logits": step_in_place(session, feeds, cache)}
        else:
            feeds |= {"attention_mask": mask, **cache}
            made = dict(zip(names, session.run(None, feeds), strict=True))
            cache = {name: made[name.replace("past_key_values", "present")] for name in cache}
        token = made["logits"][rows, last].argmax(-1)
        found.append(token)
        ids, positions, last = token[:, None], (lengths + step)[:, None], np.zeros_like(lengths)
        one = np.ones((len(prompts), 1), np.int64)
        total = np.arange(width + step + 1)
        mask = (total < (lengths + step + 1)[:, None]).astype(np.int64) if left else np.concatenate([mask, one], 1)
    return np.stack(found, 1)


def step_in_place(session: onnxruntime.InferenceSession, feeds: dict[str, np.ndarray], cache: dict[str, np.ndarray]
                  ) -> np.ndarray:
    """Logits of a step that writes into the caches: past and present are the same memory."""
    bound = session.io_binding()
    for name, value in feeds.items():
        bound.bind_cpu_input(name, value)
    for name, value in cache.items():
        held = onnxruntime.OrtValue.ortvalue_from_numpy(value)  # on a CPU the array's own memory
        bound.bind_ortvalue_input(name, held)
        bound.bind_ortvalue_output(name.replace("past_key_values", "present"), held)
    bound.bind_output("logits", "cpu")
    session.run_with_iobinding(bound)
    return bound.get_outputs()[-1].numpy()


def main(folder: str, *texts: str) -> None:
    from tokenizers import Tokenizer

    exported(Path(folder))
    if not (Path(folder) / "tokenizer.json").is_file():
        raise ValueError(f"{folder} has no tokenizer.json: put the model's there, and export again")
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    for text, answer in zip(texts, generate(folder, [tokenizer.encode(t).ids for t in texts], 32), strict=True):
        print(f"{text}{tokenizer.decode(answer.tolist())}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("prompts", nargs="+")
    asked = parser.parse_args()
    try:
        main(asked.folder, *asked.prompts)
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
