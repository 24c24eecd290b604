"""`python -m benchmarks.papers flexgen|hybridserve|bestserve|flashdecoding|pope [--json]`: published tables,
reproduced."""

from __future__ import annotations

import argparse
import importlib

PAPERS = ("flexgen", "hybridserve", "bestserve", "flashdecoding", "pope")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.papers", description=__doc__)
    parser.add_argument("paper", choices=PAPERS)
    parser.add_argument("--json", action="store_true", help="print JSON rows instead of tables")
    options = parser.parse_args()
    importlib.import_module(f"benchmarks.papers.{options.paper}").main(options.json)


if __name__ == "__main__":
    main()
