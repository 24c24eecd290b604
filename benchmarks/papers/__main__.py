"""`python -m benchmarks.papers NAME [--json]`: published tables, reproduced."""

from __future__ import annotations

import argparse
import importlib

from benchmarks.papers.tables import as_json, as_markdown

PAPERS = ("flexgen", "hybridserve", "bestserve", "flashdecoding", "pope", "experts")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.papers", description=__doc__)
    parser.add_argument("paper", choices=PAPERS)
    parser.add_argument("--json", action="store_true", help="print JSON rows instead of tables")
    options = parser.parse_args()
    paper = importlib.import_module(f"benchmarks.papers.{options.paper}")
    print((as_json if options.json else as_markdown)(paper.rows()))
    for line in paper.remarks() if hasattr(paper, "remarks") and not options.json else ():
        print(line)


if __name__ == "__main__":
    main()
