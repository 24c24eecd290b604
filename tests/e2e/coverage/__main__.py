"""Which architectures and compiled models work: `python -m tests.e2e.coverage [--only PART …] [--write]`.

Every row is run: the same tokens, or results, as without Forebay, or a refusal that names its reason. `--write` keeps
the table in `kept.json` and makes `docs/coverage.md` of it; with `--only`, the other rows stay as they
were.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[2]))  # where tests find what they share

from tests.e2e.coverage import architectures, compiled, diffusion, others
from tests.e2e.coverage.outcome import Outcome

KEPT = Path(__file__).with_name("kept.json")
PAGE = Path(__file__).parents[3] / "docs" / "coverage.md"
TABLES = {
    "language models": (architectures.ARCHITECTURES, architectures.check),
    "images": (others.IMAGES, others.check_images),
    "encoder-decoders": (others.BOTH, others.check_both),
    "embeddings": (others.TEXTS, others.check_texts),
    "compiled models": (compiled.MODELS, compiled.check),
    "diffusion models": (diffusion.MODELS, diffusion.check),
}
HEADS = {
    "language models": "`forebay.wrap` and `generate`: two prompts of unequal length, streamed within a budget, chunk "
                       "by chunk. Equal: the tokens are transformers' own of each prompt by itself.",
    "images": "`generate` with what transformers' processors make of images: two prompts with an image each, of other "
              "sizes where the kind has any, a batch with and without images, and text alone. Equal: the tokens are "
              "transformers' own.",
    "encoder-decoders": "`forebay.wrap` and `generate` with layers that come and go: greedily and by three beams. "
                        "Equal: the tokens are transformers' own.",
    "embeddings": "`forebay.Embedder` with layers that come and go. Equal: the vectors are within 1e-5 of those of "
                  "each text by itself.",
    "compiled models": '`torch.compile(model, backend="forebay")` with less memory than the weights take. Equal: the '
                       "results are eager's to rounding, and nothing ran outside the budget.",
    "diffusion models": "The same for transformers, UNets and VAEs of diffusers 0.42.",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.e2e.coverage", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="PART", help="rows with one of these in their names")
    parser.add_argument("--write", action="store_true", help="keep the table, and make the page of it")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*lies in memory")
    found: dict[str, dict[str, Outcome]] = {}
    for table, (rows, check) in TABLES.items():
        found[table] = {}
        for name in rows:
            if asked.only and not any(part.lower() in f"{table} {name}".lower() for part in asked.only):
                continue
            began = time.monotonic()
            try:
                outcome = found[table][name] = check(name)
            except ModuleNotFoundError as error:  # the row stays as it was
                print(f"{table[:8]}  {name:24} needs {error.name}")
                continue
            print(f"{table[:8]}  {name:24} {outcome.result:8} {time.monotonic() - began:5.1f} s  {outcome.reason}",
                  flush=True)
    if asked.write:
        write(found)
    return int(any(o.result == "failed" for rows in found.values() for o in rows.values()))


def write(found: dict[str, dict[str, Outcome]]) -> None:
    """Keep what was found beside the rows known before, and make the page of all."""
    import transformers

    known = json.loads(KEPT.read_text()) if KEPT.is_file() else {}
    kept = {table: {name: asdict(found[table][name]) if name in found[table] else known.get(table, {}).get(name)
                    for name in rows} for table, (rows, _) in TABLES.items()}
    kept = {table: {name: row for name, row in rows.items() if row} for table, rows in kept.items()}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    KEPT.write_text(json.dumps({"versions": versions, **kept}, indent=1) + "\n")
    PAGE.write_text(page(kept, versions))


def page(kept: dict[str, dict[str, dict[str, str]]], versions: dict[str, str]) -> str:
    """docs/coverage.md."""
    made_with = " and ".join(f"{name} {version}" for name, version in versions.items())
    lines = ["# What works", "", f"Made by `python -m tests.e2e.coverage --write` with {made_with}, on models of a "
             "few layers and random weights."]
    for table, rows in kept.items():
        equal = [name for name, row in rows.items() if row["result"] == "equal"]
        lines += ["", f"## {table.capitalize()}", "", HEADS[table], "", f"{len(equal)} of {len(rows)} work:",
                  ", ".join(equal) + "."]
        others = [(name, row) for name, row in rows.items() if row["result"] != "equal"]
        if others:
            lines += ["", "| Others | | Message |", "|---|---|---|"]
            lines += [f"| {name} | {row['result']} | {row['reason'].replace('|', '¦')} |" for name, row in others]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
