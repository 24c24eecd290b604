"""What quantised folders score when they really run: `python -m benchmarks.accuracy`.

SmolLM2-135M as it is and quantised by `forebay quantize`, each streamed within a budget by `forebay eval`: perplexity
of the example text, and how often the last word of the example passages is predicted. Beside it stands the perplexity
of the transformers model with its weights rounded in place, on the same windows (see `benchmarks.perplexity`): what
the run must reproduce.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.perplexity import TEXT, Reference, by_format, text_ids
from forebay.kernels.formats.table import WEIGHT_FORMATS
from forebay.rewriter.checkpoints.resolve import resolve_model

FORMATS = tuple(WEIGHT_FORMATS)


def forebay(*arguments: str | Path) -> str:
    """The standard output of a command of `forebay`."""
    done = subprocess.run([sys.executable, "-m", "forebay", *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"forebay {' '.join(map(str, arguments))}: {done.stderr[-1000:]}")
    return done.stdout


def evaluate(folder: str | Path, words: Path, tokens: int, budget: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(forebay(
        "eval", folder, "--text", TEXT, "--words", words, "--tokens", str(tokens), "--budget", f"device={budget}",
        "--batch", "4", "--json"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--tokens", type=int, default=4096, help="of the text, for perplexity")
    parser.add_argument("--words", type=Path, default=TEXT.parent / "words.jsonl")
    parser.add_argument("--budget", default="300MB", help="device memory of a run")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    native = resolve_model("demo", dequantize=True)
    ids = text_ids(native, TEXT)[: args.tokens]
    reference = Reference(native)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.formats:
            folder = native if name == "native" else Path(scratch) / name
            if name != "native":
                forebay("quantize", "demo", folder, "--weights", name)
            rounded = reference.measure(ids, None if name == "native" else by_format(name), None)
            found = evaluate(folder, args.words, args.tokens, args.budget)
            rows.append(found | {"format": name, "rounded_in_place": rounded})
            print(f"{name:<8} perplexity {found['perplexity']:8.4f} (rounded in place {rounded:8.4f}, ratio "
                  f"{found['perplexity'] / rounded:.5f}) on {found['tokens']} tokens; next word "
                  f"{found['next_word_accuracy']:.3f}, {found['words_right']} of {found['words']}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
