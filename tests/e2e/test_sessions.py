"""Sessions go on from one process to the next with the same tokens, and those of anything else are refused."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from families import llama
from serving.served import BUDGET, NEW, PROMPT, Running, save_model, serving
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import forebay
from forebay.commands.app import app
from forebay.commands.chat import conversation
from forebay.commands.plan_job import common_tokens, with_reuse
from forebay.commands.prompts import Prompt, PromptLine
from forebay.commands.terminal import JobError
from forebay.prefix_identity import PrefixIdentity
from forebay.rewriter.ir.plan import PlanError
from forebay.rewriter.machine.profile import Machine, save_machine
from forebay.rewriter.planning.options import Options
from forebay.runtime.run.balance import admission_order
from forebay.runtime.run.prefix_cache import PrefixBlock
from forebay.session_file import SavedSession, SessionError, read_session, write_session

pytestmark = [pytest.mark.filterwarnings("ignore:.*lies in memory"),
              pytest.mark.filterwarnings("ignore:OpenMP threads spin")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("talks")
    save_model(folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 1024}))
    save_machine(Machine.default(), folder / "machine.json")
    return folder


def opened(folder: Path, **options: Any) -> Any:
    return forebay.wrap(folder, 2 * BUDGET, machine=Machine.default(), **{
        "prompt": PROMPT, "new_tokens": NEW, "prefill_chunk": 4, "prefix_cache": "1MiB", **options})


def answered(lm: Any, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    found = lm.generate(ids[None], max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    return found[0, len(ids) :], lm.tally.cached


def test_a_session_goes_on_in_another_model_of_the_same_files(folder: Path, tmp_path: Path) -> None:
    ids = torch.randint(4, 190, (PROMPT - 1,), generator=torch.Generator().manual_seed(0))
    with opened(folder, prefix_cache=0) as lm:
        expected = answered(lm, ids)
        with pytest.raises(PlanError, match="keeps no prompts"):
            lm.save_session(tmp_path / "session")
    with opened(folder) as lm:
        first = answered(lm, ids[:13])[1], answered(lm, ids[:14])[1]
        lm.save_session(tmp_path / "session", said={"turns": 2})
        nbytes = lm.prefixes.nbytes
    assert expected[1] == 0 and first == (0, 12)
    with opened(folder, prompt=8) as lm:  # the session's prompts are longer than those of the plan
        assert lm.load_session(tmp_path / "session") == {"turns": 2} and lm.prefixes.nbytes == nbytes
        found = answered(lm, ids)
        assert torch.equal(found[0], expected[0]) and found[1] == 12
    with opened(folder, prefix_cache=nbytes - 1) as lm:
        lm.load_session(tmp_path / "session")
        assert 0 < lm.prefixes.nbytes < nbytes and answered(lm, ids)[1] == 8
    with opened(folder, prefill_chunk=6) as lm:  # rounds differently: all is computed
        assert lm.load_session(tmp_path / "session") == {"turns": 2} and answered(lm, ids)[1] == 0


def test_sessions_of_anything_else_are_refused(folder: Path, tmp_path: Path) -> None:
    path, other = tmp_path / "session", tmp_path / "other"
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(llama(2)).save_pretrained(other)
    with opened(folder) as lm:
        lm.save_session(path)
        identity = lm.prefix_identity
    with opened(other) as lm, pytest.raises(SessionError, match="session: this session is of another model; name"):
        lm.load_session(path)
    with opened(folder, cache="kv8") as lm, pytest.raises(SessionError, match=r"format \(native, native; this is kv8"):
        lm.load_session(path)
    good = path.read_bytes()
    for release in ("0.0.9", "0.0.8, torch 1"):
        write_session(path, SavedSession(PrefixIdentity(**vars(identity) | {"release": release}), (4, 4), None, ()))
        with pytest.raises(SessionError, match=re.escape(f"another release ({release}; this is {identity.release})")):
            read_session(path, identity)
    for spoiled in (b"", good[:-2] + b"\n", b"x" + good[1:], b"{}\n"):
        path.write_bytes(spoiled)
        with pytest.raises(SessionError, match="is no session of this release, or it is damaged"):
            read_session(path, identity)


def test_a_session_that_is_killed_while_it_is_written_is_the_one_before(tmp_path: Path) -> None:
    path, identity = tmp_path / "session", PrefixIdentity(*"mfrwcs")

    def saved(number: int) -> SavedSession:
        rows = torch.full((1 << 20,), number, dtype=torch.uint8)
        return SavedSession(identity, (4, 4), number, [(b"key", PrefixBlock(b"", rows))])

    write_session(path, saved(0))
    for delay_s in (0.0, 0.002, 0.005, 0.02):
        child = os.fork()
        if child == 0:
            try:
                for number in range(1, 250):
                    write_session(path, saved(number))
            finally:
                os._exit(0)
        time.sleep(delay_s)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = read_session(path, identity)
        assert set(found.tree[0][1].rows.tolist()) == {found.said}


def talk(folder: Path, lines: str, *words: str) -> tuple[str, str]:
    """What `forebay chat` answers, and what it says besides, to these lines."""
    result = CliRunner().invoke(app, [
        "chat", str(folder), "--budget", str(4 * BUDGET), "--temperature", "0", "--new-tokens", "4", "--prefill-chunk",
        "4", "--machine", str(folder / "machine.json"), *words], input=lines)
    assert result.exit_code in (0, 2), result.output
    return result.stdout, result.stderr


def test_a_chat_goes_on_from_its_file(folder: Path, tmp_path: Path) -> None:
    lines, file = ["w1 w2 w3 w4 w5 w6\n", "w7 w8\n", "w9\n"], ("--session", str(tmp_path / "file"))
    whole, _ = talk(folder, "".join(lines), "--prefix-cache", "0")
    first, _ = talk(folder, "".join(lines[:2]), *file)
    last, told = talk(folder, lines[2], *file)
    assert first + last == whole and "going on after 4 messages" in told


def test_a_file_that_holds_another_conversation_is_refused(tmp_path: Path) -> None:
    class Loaded:
        def load_session(self, path: Path) -> Any:
            return json.loads(path.read_text())

    path, lm = tmp_path / "file", cast(Any, Loaded())
    begun = [{"role": "system", "content": "a"}]
    assert conversation(lm, path, "a") == begun and conversation(lm, None, None) == []
    path.write_text(json.dumps(said := [*begun, {"role": "user", "content": "b"}]))
    assert conversation(lm, path, "a") == conversation(lm, path, None) == said
    with pytest.raises(JobError, match=r"--system: the conversation in .*file has another system message"):
        conversation(lm, path, "c")
    for other in ('{"turns": 1}', "[1]", '[{"role": "user"}]'):
        path.write_text(other)
        with pytest.raises(JobError, match="file holds no conversation"):
            conversation(lm, path, None)


def test_a_job_computes_what_its_lines_begin_with_once(folder: Path, tmp_path: Path) -> None:
    """Answers stand in the order of the prompts, and are those of a job that keeps nothing."""
    system = " ".join(f"w{i}" for i in range(80))
    lines = [{"prompt": f"{system if i % 4 else f'w{i}'} w{i} w{2 * i}"} for i in range(20)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def ran(name: str, *words: str) -> dict[str, Any]:
        result = CliRunner().invoke(app, [
            "run", str(folder), "--no-chat", "--prompts", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / name),
            "--budget", str(4 * BUDGET), "--new-tokens", "2", "--machine", str(folder / "machine.json"), "--batch", "4",
            "--prefill-chunk", "16", "--json", *words])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)  # type: ignore[no-any-return]

    plain, reusing = ran("plain", "--prefix-cache", "0"), ran("reusing")
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "reusing").read_bytes()
    assert reusing["steps"] <= plain["steps"] - 14 * 5 and reusing["promised_nbytes"] > plain["promised_nbytes"] + (
        200 << 20)


def test_memory_is_taken_where_prompts_begin_alike() -> None:
    alike = [Prompt(PromptLine(i, i, "a"), (*range(200), i)) for i in range(5)]
    apart = [Prompt(PromptLine(i, i, "a"), (i, *range(200))) for i in range(5)]
    assert common_tokens(prompt.ids for prompt in [*alike, *apart]) == 4 * 200
    assert with_reuse(Options(), alike).prefix_cache == 256 << 20 and with_reuse(Options(), apart).prefix_cache is None
    assert with_reuse(Options(prefix_cache=0), alike).prefix_cache == 0 and common_tokens([]) == 0
    assert admission_order({i: n for i, n in enumerate((5, 9, 7, 9, 6))}) == [0, 4, 2, 3, 1]
    assert admission_order({i: n for i, n in enumerate((5, 9, 7, 8, 6))}, [(b"a",), (), (), (b"a", b"b"), (b"a", b"b")]
                           ) == [2, 0, 4, 3, 1]


def test_a_server_knows_its_prompts_after_a_restart(folder: Path, tmp_path: Path) -> None:
    system = " ".join(f"w{i}" for i in range(5, 14))

    def cached(server: Running, prompt: str) -> tuple[str, int]:
        status, reply = server.complete(prompt=prompt, max_tokens=4, temperature=0)
        assert status == 200
        return reply["choices"][0]["text"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]

    def served(ask: Callable[[Running], Any]) -> Any:
        with serving(folder, planned=opened(folder, batch_slots=3, cache_dir=tmp_path)) as server:
            return ask(server)

    first = served(lambda server: cached(server, f"{system} w1"))
    again = served(lambda server: cached(server, f"{system} w1"))
    assert first[1] == 0 and again == (first[0], 8)
    for file in tmp_path.glob("*.kv"):
        file.write_bytes(file.read_bytes()[:-5])
    assert served(lambda server: cached(server, f"{system} w1")) == first
    assert served(lambda server: cached(server, f"{system} w1")) == again
    with opened(folder, batch_slots=3, cache_dir=tmp_path) as lm:
        _ = lm.session
        result = CliRunner().invoke(app, ["serve", str(folder), "--cache-dir", str(tmp_path), "--port", "0", "--budget",
                                          str(4 * BUDGET), "--machine", str(folder / "machine.json")])
        assert result.exit_code == 2 and "another process keeps its prompts here; name another" in result.stderr
