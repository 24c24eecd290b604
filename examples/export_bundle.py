"""Export a model as a bundle, which starts without capture, and answer from it:
python examples/export_bundle.py MODEL OUT "PROMPT"

MODEL is a folder with a checkpoint, or `demo`.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # before torch: spinning threads take the core the disk reader needs

from tokenizers import Tokenizer

import forebay


def main(model: str, out: str, text: str) -> None:
    import torch

    folder = forebay.export(model, out, budget="120MiB", prompt=64, new_tokens=32)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with forebay.open_bundle(folder) as lm:
        ids = torch.tensor([tokenizer.encode(text).ids])
        print(text + " " + tokenizer.decode(lm.generate(ids, max_new_tokens=16)[0, ids.shape[1] :].tolist()))


if __name__ == "__main__":
    main(*sys.argv[1:])
