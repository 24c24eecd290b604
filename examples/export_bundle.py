"""Export a model as a bundle, which starts without capture, and answer from it:
python examples/export_bundle.py MODEL OUT "PROMPT"

MODEL is a folder with a checkpoint, or `demo`.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # before torch: spinning threads take the core the disk reader needs

from tokenizers import Tokenizer

import forebay


def main(model: str, out: str, text: str) -> None:
    import torch

    if not text.strip():
        raise ValueError("the prompt has no token: give it at least one")
    folder = forebay.export(model, out, budget="120MiB", prompt=64, new_tokens=32)
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder} has no tokenizer.json: put one beside the model, and export it again")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with forebay.open_bundle(folder) as lm:
        ids = torch.tensor([tokenizer.encode(text).ids])
        print(text + " " + tokenizer.decode(lm.generate(ids, max_new_tokens=16)[0, ids.shape[1] :].tolist()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "out", "prompt"):
        parser.add_argument(name)
    asked = parser.parse_args()
    try:
        main(asked.model, asked.out, asked.prompt)
    except (forebay.CaptureError, forebay.CheckpointError, forebay.ExportError, forebay.PlanError, ValueError) as error:
        parser.exit(2, f"error: {error}\n")
