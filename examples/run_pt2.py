"""Answer prompts with an exported torch program: python examples/run_pt2.py FOLDER "PROMPT" …

The folder is what `forebay export MODEL FOLDER --format pt2` (or aoti) wrote; needs torch and forebay's kernels, and
tokenizers for the prompts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import forebay.kernels.operators  # noqa: F401  registers the operators that programs name


def exported(folder: Path) -> dict[str, Any]:
    """What export.json says of a folder that was exported for here; ValueError for another."""
    known = folder / "export.json"
    said = json.loads(known.read_text()) if known.is_file() else {}
    if said.get("format") not in ("pt2", "aoti") or "caches" not in said:
        raise ValueError(f"{folder} holds no program of a language model: write one with forebay export MODEL OUT "
                         "--format pt2")
    return dict(said)


def load(folder: Path) -> Callable[..., Any]:
    """The program: input_ids [B, S], start [B], last [B], caches (k and v of each layer) -> logits [B, V]."""
    if exported(folder)["format"] == "pt2":
        return torch.export.load(str(folder / "model.pt2")).module()
    from torch import _inductor

    return _inductor.aoti_load_package(str(folder / "model.pt2"))


def generate(folder: str | Path, prompts: Sequence[Sequence[int]], new_tokens: int) -> torch.Tensor:
    """Greedy tokens int64 [len(prompts), new_tokens] that follow prompts of any lengths but 0."""
    if not all(len(p) for p in prompts) or not prompts:
        raise ValueError("a prompt has no token: give each at least one")
    program, known = load(Path(folder)), exported(Path(folder))
    lengths = torch.tensor([len(p) for p in prompts])
    room = int(lengths.max()) + new_tokens
    caches = [torch.zeros(len(prompts), c["kv_heads"], room, c["head_dim"], dtype=getattr(torch, c["dtype"]))
              for c in known["caches"] for _ in "kv"]
    more = {"length": lengths} if known["length"] else {}
    # prompts stand at the left: what a short one computes past its end is overwritten before it is seen
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(p) for p in prompts], batch_first=True)
    start, last, found = torch.zeros_like(lengths), lengths - 1, []
    for _ in range(new_tokens):
        logits = program(input_ids=ids, start=start, last=last, caches=caches, **more)
        start = start + last + 1
        ids, last = logits.argmax(-1)[:, None], torch.zeros_like(last)
        found.append(ids)
        more = {name: start + 1 for name in more}
    return torch.cat(found, 1)


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
