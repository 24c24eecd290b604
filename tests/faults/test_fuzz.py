"""Files from anybody: mutated and made-up inputs of every format end in the project's own errors, soon and in little
memory, or are read.

Each case runs under a limit of time and of address space. FOREBAY_TEST_ALL=1 (`make test-all`) tries 10 000 cases of
each format instead of 80; FOREBAY_TEST_SEED draws others.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from budgets import attention_nbytes
from selection import ALL

from forebay.commands.jobs import AnswerFile
from forebay.commands.prompts import read_requests
from forebay.commands.terminal import JobError, message_of
from forebay.language_model import LanguageModel
from forebay.open_model import open_model
from forebay.prefix_identity import PrefixIdentity
from forebay.rewriter.checkpoints import identity
from forebay.rewriter.checkpoints.config import read_config, read_eos, read_generation_config
from forebay.rewriter.checkpoints.gguf_repack import open_gguf
from forebay.rewriter.checkpoints.open_checkpoint import open_checkpoint
from forebay.rewriter.checkpoints.packed import MANIFEST, manifest_checksum, open_quantized
from forebay.rewriter.checkpoints.packed_writer import PendingTensor, write_quantized
from forebay.rewriter.ir.byte_sizes import parse_budget
from forebay.rewriter.ir.plan import Budget, Workload, load_plan
from forebay.rewriter.machine.profile import Machine, load_machine
from forebay.rewriter.planning.options import Options
from forebay.runtime.run.prefix_cache import PrefixBlock
from forebay.session_file import SavedSession, read_session, write_session
from tests.faults import fuzz_texts
from tests.faults.spoil import Format, Header, mutated_json
from tests.rewriter.ir.test_plan import PLAN

COUNT = 10_000 if ALL else 80
SEED = int(os.environ.get("FOREBAY_TEST_SEED", "0"))
TIME_S = 10
NBYTES = 256 << 20  # of address space, beyond what a case began with


class Late(BaseException):
    """A case that took too long; no handler of errors takes it for a file that is refused."""


@contextmanager
def _limits() -> Iterator[None]:
    """Of address space and of time: the processor's, so that a machine with other work fails no test, and ten times
    as much of the clock's, for what waits and computes nothing."""
    def late(number: int, frame: object) -> None:
        raise Late(f"not read within {TIME_S} s")

    before = [(number, signal.signal(number, late)) for number in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, TIME_S)
    signal.setitimer(signal.ITIMER_REAL, 10 * TIME_S)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + NBYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        for number, handler in before:
            signal.signal(number, handler)


def _safetensors(folder: Path) -> Format:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(5, dtype=torch.int64)}
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors")

    return Format(folder / "model.safetensors", lambda: open_checkpoint(folder))


class _SessionHeader(Format):
    """What a session says of itself, with the checksum set right."""

    def spoil(self, rng: random.Random) -> bytes:
        line, data = self.good.split(b"\n", 1)
        header = json.dumps(mutated_json(json.loads(line.split(b" ", 1)[1]), rng)).encode()
        return hashlib.sha256(header).hexdigest().encode() + b" " + header + b"\n" + data


def _session(folder: Path) -> Format:
    tree = [(b"a", PrefixBlock(b"", torch.zeros(300, dtype=torch.uint8))),
            (b"b", PrefixBlock(b"a", torch.ones(300, dtype=torch.uint8)))]
    identity = PrefixIdentity("model", "files", "release", "weights", "cache", "steps")
    write_session(folder / "session", SavedSession(identity, (8, 4), [{"role": "user", "content": "a"}], tree))
    return Format(folder / "session", lambda: read_session(folder / "session", identity))


def _index(folder: Path) -> Format:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(3)}, folder / "one.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {
        "a": "one.safetensors"}}))
    return Format(folder / "model.safetensors.index.json", lambda: open_checkpoint(folder))


def _gguf(kinds: Mapping[str, str], folder: Path) -> Format:
    """A file of one layer, whose matrices are of these types."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_block_count(1)
    writer.add_context_length(32)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(256)
    writer.add_head_count(2)
    writer.add_vocab_size(8)
    writer.add_layer_norm_rms_eps(1e-5)
    layer = {name: (256, 256) for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up",
                                           "ffn_down")}
    layer |= {"attn_norm": (256,), "ffn_norm": (256,)}
    for name, shape in {"token_embd.weight": (8, 256), "output_norm.weight": (256,), "output.weight": (8, 256),
                        **{f"blk.0.{part}.weight": size for part, size in layer.items()}}.items():
        kind = kinds.get(name.removeprefix("blk.0.").removesuffix(".weight"))
        if kind is None:
            writer.add_tensor(name, torch.ones(shape).numpy())
            continue
        ggml = gguf.GGMLQuantizationType[kind]
        block, nbytes = gguf.GGML_QUANT_SIZES[ggml]
        writer.add_tensor(name, torch.full((shape[0], shape[1] // block * nbytes), 17, dtype=torch.uint8).numpy(),
                          raw_dtype=ggml)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    def read() -> None:
        for tensor in open_gguf(folder / "model.gguf").tensors:
            if tensor.format():
                tensor.repacked()(0, tensor.shape[0])

    return Format(folder / "model.gguf", read)


def _manifest(folder: Path) -> Format:
    def prepare(out: Path) -> None:
        (out / "config.json").write_text("{}")

    values = torch.ones(2000)
    tensor = PendingTensor("w", values.dtype, (2000,), lambda: (None, iter([values])))
    write_quantized(folder / "q", [tensor], {"a": 1}, prepare)

    def mend(value: dict[str, Any]) -> dict[str, Any]:
        value.pop("checksum", None)
        return value | {"checksum": manifest_checksum(value)}

    return Format(folder / "q" / MANIFEST, lambda: open_quantized(folder / "q"), mend)


def _plan(folder: Path) -> Format:
    PLAN.save(folder / "plan.json")
    return Format(folder / "plan.json", lambda: load_plan(folder / "plan.json"))


def _replayed(folder: Path) -> Format:
    """A plan that is taken for its model: proved, its memory given out, its weights loaded."""
    from families import llama
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(llama(1)).save_pretrained(folder / "model")
    opened = open_model(folder / "model")
    machine, options = Machine.default(), Options(prefill_chunk=24)
    budget = Budget((400 << 10) + max(0, attention_nbytes(2, 4, 28, 16, 24)))
    with LanguageModel(*opened, budget, Workload(2, 24, 4), options, machine) as lm:
        lm.plan.save(folder / "plan.json")

    def read() -> None:
        plan = load_plan(folder / "plan.json")
        LanguageModel(*opened, Budget(plan.budget.device), plan.workload, Options(), machine, plan=plan).close()

    return Format(folder / "plan.json", read)


def _machine(folder: Path) -> Format:
    (folder / "machine.json").write_text(Machine.default().to_json())

    def read() -> None:
        try:
            load_machine(folder / "machine.json")
        except ValueError as error:  # as `machine_profile` tells it
            raise JobError(str(error)) from error

    return Format(folder / "machine.json", read)


def _answers(folder: Path) -> Format:
    with AnswerFile(folder / "out.jsonl", {"model": "m"}) as output:
        for i in range(3):
            output.write({"id": i, "prompt": "a", "text": "b"})
    return Format(folder / "out.jsonl", lambda: AnswerFile(folder / "out.jsonl", {"model": "m"}).close())


def _settings(folder: Path) -> Format:
    made = _answers(folder)
    return Format(folder / "out.jsonl.settings", made.read)


def _prompts(folder: Path) -> Format:
    lines = [{"id": "a", "prompt": "b"}, {"prompt": "c"}, {"id": 7, "messages": [{"role": "user", "content": "d"}]}]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Format(folder / "in.jsonl", lambda: read_requests(folder / "in.jsonl"))


def _config(folder: Path) -> Format:
    from families import llama

    llama(1).save_pretrained(folder)
    return Format(folder / "config.json", lambda: (read_config(folder), read_eos(folder)))


def _generation(folder: Path) -> Format:
    from families import llama

    llama(1).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3], "do_sample": True, "top_k": 5}))
    return Format(folder / "generation_config.json", lambda: read_generation_config(folder))


def _budget(folder: Path) -> Format:
    (folder / "budget").write_bytes(b"device=120MiB,host=1.5GB,disk=/tmp")
    return Format(folder / "budget", lambda: parse_budget((folder / "budget").read_bytes().decode("latin-1")))


FORMATS: dict[str, Callable[[Path], Format]] = {
    "safetensors": _safetensors, "header": lambda folder: Header(_safetensors(folder).path,
                                                                 lambda: open_checkpoint(folder)),
    "index": _index, "manifest": _manifest, "plan": _plan,
    "gguf": partial(_gguf, {"attn_q": "Q4_0", "attn_k": "Q5_1", "attn_v": "MXFP4", "ffn_gate": "Q8_0",
                            "ffn_up": "IQ4_NL", "ffn_down": "Q6_K"}),
    "gguf iq": partial(_gguf, {"attn_q": "IQ1_S", "attn_k": "IQ1_M", "attn_v": "IQ2_XXS", "attn_output": "IQ2_XS",
                               "ffn_gate": "IQ2_S", "ffn_up": "IQ3_XXS", "ffn_down": "IQ3_S", "output": "IQ4_XS"}),
    "replayed plan": _replayed, "machine": _machine, "answers": _answers,
    "session": _session, "session header": lambda folder: _SessionHeader((made := _session(folder)).path, made.read),
    "settings": _settings, "prompts": _prompts, "config": _config, "generation config": _generation, "budget": _budget,
    "tokenizer": fuzz_texts.tokenizer, "tokenizer settings": fuzz_texts.tokenizer_settings,
    "chat template": fuzz_texts.chat_template, "texts": fuzz_texts.texts, "config alone": fuzz_texts.config_alone,
    "served": fuzz_texts.served, "conversion": fuzz_texts.conversion,
    "calibration": fuzz_texts.calibration,
    **{method: partial(fuzz_texts.grouped, method) for method in ("awq", "gptq", "auto-round", "compressed-tensors")},
    "adapter": fuzz_texts.adapter, "adapter header": partial(fuzz_texts.adapter, header=True),
    "adapter settings": partial(fuzz_texts.adapter, config=True),
    "mxfp4": fuzz_texts.mxfp4, **{method: partial(fuzz_texts.coded, method) for method in fuzz_texts.CODED},
    **{f"{method} header": partial(fuzz_texts.coded, method, header=True) for method in fuzz_texts.CODED},
    **{f"{method} settings": partial(fuzz_texts.coded, method, config=True) for method in fuzz_texts.CODED}}


@pytest.mark.parametrize("name", FORMATS)
def test_only_our_own_errors_come_of_a_spoiled_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(identity, "TICK_NS", 0)  # no file is written to while it is read
    made = FORMATS[name](tmp_path)
    made.read()
    refused = 0
    # What transformers reads takes it 50 to 300 ms a case, and so does a plan that is taken.
    slow = name in ("gguf", "gguf iq", "config", "generation config", "replayed plan")
    count = COUNT // 4 if slow or (not ALL and name.startswith(fuzz_texts.CODED) and " " in name) else COUNT
    for number in range(count):
        rng = random.Random(f"{SEED} {name} {number}")
        spoiled = made.spoil(rng)
        for file in tmp_path.glob("out.jsonl*"):
            file.write_bytes(made.good if file == made.path else file.read_bytes())
        made.path.write_bytes(spoiled)
        told = f"{name} case {number}, seed {SEED}: {spoiled[:300]!r}"
        try:
            with _limits():
                made.read()
        except Exception as error:
            message = message_of(error)
            assert message and "\n" not in message and len(message) < 1200, f"{type(error).__name__}: {error}\n{told}"
            assert not isinstance(error, MemoryError), told
            refused += 1
    made.path.write_bytes(made.good)
    made.read()
    print(f"\n{name}: {count} cases, {refused} refused, the others read, seed {SEED}")
    assert refused > 0 or name == "prompts"
