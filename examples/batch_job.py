"""Answer a file of prompts, and go on where it stopped if it is started again:
python examples/batch_job.py MODEL PROMPTS.jsonl ANSWERS.jsonl

A line of PROMPTS is {"id": …, "prompt": …}, one of ANSWERS {"id": …, "text": …, …}.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path


def main(model: str, prompts: str, answers: str) -> None:
    command = [sys.executable, "-m", "forebay", "run", model, "--prompts", prompts, "--output", answers,
               "--budget", "120MiB", "--new-tokens", "16"]
    ran = subprocess.run(command, env={"GOMP_SPINCOUNT": "0", **os.environ})
    if ran.returncode:
        sys.exit(ran.returncode)
    for line in Path(answers).read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        print(f"{entry['id']}: {entry['text']}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "prompts", "answers"):
        parser.add_argument(name)
    asked = parser.parse_args()
    main(asked.model, asked.prompts, asked.answers)
