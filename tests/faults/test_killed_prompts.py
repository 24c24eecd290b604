"""A process that is killed while it writes a block of a prompt leaves those before it, and answers stay as they are."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from forked import run_code
from prefixed import TIERS, answers, opened, prompts_of, save_family
from selection import at_length

pytestmark = [pytest.mark.filterwarnings("ignore:.*lies in memory"),
              pytest.mark.filterwarnings("ignore:OpenMP threads spin")]
KILLED = """
import json, os, signal, sys, threading

sys.path[:0] = ["tests"]
import torch
from prefixed import answers, opened
from forebay.runtime.run import prefix_files

folder, options, prompts, last = sys.argv[1], *map(json.loads, sys.argv[2:])
moments = []

def moment():
    if not threading.current_thread().name.startswith("forebay-prompts_"):
        return  # no writer of blocks
    moments.append(None)
    if len(moments) == last:
        os.kill(os.getpid(), signal.SIGKILL)

def before(call):
    return lambda *given: moment() or call(*given)

def audited(event, given):
    if event in ("open", "os.rename") and str(given[0]).endswith(".draft"):
        moment()

sys.addaudithook(audited)
prefix_files._checksum = before(prefix_files._checksum)
prefix_files.drop_file = before(prefix_files.drop_file)
os.fsync = before(os.fsync)
with opened(folder, **options) as lm:
    answers(lm, [torch.tensor(ids) for ids in prompts])
"""
MOMENTS = 6  # of a block: before and after its rows, before its sync, before its rename, and two after it


@pytest.mark.parametrize(("family", "tier", "moment"), [
    ("lfm2", "disk", 7), *(at_length("lfm2", "disk", moment) for moment in (1, 2, 3, 4, 5, 9, 11)),
    *(at_length(family, tier, moment) for family, tier in (
        ("mamba", "disk"), ("falcon_h1", "host"), ("qwen3_5_text", "device"), ("deepseek_v3", "device"))
      for moment in (8, 19))])
def test_answers_after_a_kill_are_as_ever(tmp_path: Path, family: str, tier: str, moment: int) -> None:
    folder = tmp_path / "model"
    save_family(family, folder)
    prompts = prompts_of(8)
    kept: dict[str, Any] = {"batch": 1, "prefix_cache": 0, "cache_dir": str(tmp_path / "prompts"), **TIERS[tier]}
    with opened(folder, batch=1, **TIERS[tier]) as lm:
        expected = answers(lm, prompts)[0]
    died = run_code(KILLED, str(folder), json.dumps(kept), json.dumps([ids.tolist() for ids in prompts]), str(moment))
    assert died.returncode == -signal.SIGKILL, died.stderr
    with opened(folder, **kept) as lm:
        _ = lm.session
        assert len(lm.prefixes.slower.blocks) == (moment + 1) // MOMENTS and not list(tmp_path.rglob("*.draft"))
        found, known, _ = answers(lm, prompts)
        assert found == expected and bool(known[0]) is (moment + 1 >= MOMENTS)
    with opened(folder, **kept) as lm:
        again, known, _ = answers(lm, prompts)
        assert again == expected and all(n > 0 for n, ids in zip(known, prompts, strict=True) if len(ids) > 4)
