"""A batch job: answers appended to a file as they end, and nothing lost or done twice by an interruption."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from forebay.commands.batch_answers import BatchAnswer
from forebay.commands.prompts import QUESTION, Prompt, PromptLine
from forebay.commands.terminal import JobError
from forebay.rewriter.checkpoints.checkpoint import Checkpoint
from forebay.rewriter.checkpoints.identity import read_whole, states_checksum, tokenizer_checksum
from forebay.rewriter.checkpoints.packed import is_quantized
from forebay.rewriter.checkpoints.packed_writer import write_json
from forebay.rewriter.ir.files import naming, read_input, written_whole
from forebay.rewriter.planning.options import OPTIONS, Options
from forebay.runtime.run.progress import WorkDone
from forebay.runtime.run.request import Request
from forebay.runtime.run.sampling import Sampling
from forebay.runtime.run.scheduler import OnEnd, OnStep
from forebay.runtime.run.step_inputs import PromptFeatures
from forebay.serving.text_codec import TextCodec
from forebay.structured_output import OutputGrammar

SETTINGS_SUFFIX = ".settings"  # answers.jsonl.settings says what the answers were made with
FLUSH_S = 1.0  # answers may be lost with power for so long, and until the step under way ends
BEGINNING = b'{"id": '  # of every line that `AnswerFile.write` writes


class Interrupted(Exception):
    """The user asked the job to stop; everything finished is in the output file."""


@dataclass(frozen=True)
class Ask:
    """The settings that every answer of a job shares."""

    max_new_tokens: int
    eos: tuple[int, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    model: str = ""  # its name in answers of OpenAI's form
    grammar: OutputGrammar | None = None  # of answers to lines that are not of OpenAI's form


# What to say of a setting that differs, where its value says nothing.
DIFFERENT = {
    "model": "with another model",
    "files": "before the model's files were last written or copied; if they are the same all the same",
    "tokenizer": "with another tokenizer",
    "chat_template": "with another chat template",
    "calibration": "with another calibration",
    "grammar": "with another schema",
}


def job_settings(checkpoint: Checkpoint, tokenizer: Any, ask: Ask, options: Options, *, chat: bool) -> dict[str, Any]:
    """Return the settings on which answers depend besides their prompts, as the settings file has it; the batch is
    noted when it is known (`AnswerFile.note_batch`)."""
    template = json.dumps(getattr(tokenizer, "chat_template", None), sort_keys=True)
    # A quantized model's fingerprint covers every byte, which is why its files may be copied.
    files = {} if is_quantized(checkpoint.folder) else {"files": states_checksum(checkpoint.states)}
    ranges, grammar = options.score_ranges, ask.grammar
    structured = {} if grammar is None else {"grammar": hashlib.sha256(repr(grammar).encode()).hexdigest()}
    calibrated = {"calibration": hashlib.sha256(repr(ranges).encode()).hexdigest()} if ranges else {}
    rounded = {name: getattr(options, name) for name, record in OPTIONS.items() if record.answers}
    return {
        "model": checkpoint.fingerprint, **files, **calibrated, **rounded, **structured,
        "tokenizer": tokenizer_checksum(checkpoint.folder),
        "chat_template": hashlib.sha256(template.encode()).hexdigest(), "chat": chat, "eos": list(ask.eos),
        "new_tokens": ask.max_new_tokens,
        "sampling": asdict(ask.sampling, dict_factory=_as_json) | {"seed": ask.seed} if ask.sampling.do_sample
        else "greedy"}


def _as_json(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return json.loads(json.dumps(dict(pairs)))  # type: ignore[no-any-return]


def _asked(answer: Mapping[str, Any]) -> tuple[str | int, dict[str, Any]]:
    """The id that an answer is to, and its question; KeyError or TypeError for other lines."""
    if "text" in answer:
        return answer["id"], {k: answer[k] for k in QUESTION if k in answer}
    return answer["custom_id"], {"request_id": answer["response"]["request_id"]}


class AnswerFile:
    """The output of a job, held against other jobs until `close`; each answer is one line, whole or absent.

    Opening cuts off what a crash left of a line, once everything else in the file is known to be answers of this job;
    a file refused is left as it was. `answered` maps the ids found to the questions they answer; `batch` is that of the
    job that wrote them, if known. A device or pipe is written to as well, without resuming.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any], *, force: bool = False) -> None:
        self.path = Path(path)
        self.settings, self.force = dict(settings), force
        self.batch: int | None = None
        self.answered: dict[str | int, dict[str, Any]] = {}
        self.cut_nbytes = 0
        self.empty = 0  # answers without text that this job wrote
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise JobError(f"cannot write the answers {path}: {error.strerror}") from error
        try:
            self.resumable = stat.S_ISREG(os.fstat(self._fd).st_mode)
            if self.resumable:
                with naming(self.path):
                    self._begin()
        except BaseException:
            os.close(self._fd)
            raise

    def _begin(self) -> None:
        self._lock()
        end = self._read_answers(self._end_of_whole_lines())
        self._check_settings()
        self._check_torn_line(end)
        self._write_settings()
        self.cut_nbytes = os.fstat(self._fd).st_size - end
        if self.cut_nbytes:
            os.ftruncate(self._fd, end)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise JobError(f"another job is writing {self.path}; wait for it or name another output") from error

    @property
    def _settings_path(self) -> Path:
        return self.path.with_name(self.path.name + SETTINGS_SUFFIX)

    def _end_of_whole_lines(self) -> int:
        """Bytes up to and with the last newline."""
        end = os.fstat(self._fd).st_size
        while end > 0:
            start = max(0, end - 65536)
            newline = read_whole(self._fd, end - start, start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
        return 0

    def _read_answers(self, end: int) -> int:
        """Note the answers in the first `end` bytes, which are whole lines; the end of those before the first that a
        loss of power left zeros in, which no answer has: what follows was not on disk for sure."""
        with open(self._fd, "rb", closefd=False) as file:
            file.seek(0)
            at = number = 0
            while at < end:
                raw = file.readline()
                if b"\0" in raw:
                    break
                at, number = at + len(raw), number + 1
                try:
                    entry = json.loads(raw)
                    name, question = _asked(entry)
                    if isinstance(name, bool) or not isinstance(name, str | int):
                        raise TypeError(f"id {name!r}")
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    raise JobError(f"{self.path} line {number} is no answer of a job; name another output") from error
                self.answered[name] = question
        return at

    def _check_settings(self) -> None:
        """Refuse to mix answers made with other settings, naming the first that differs."""
        if not self.answered or self.force:
            return
        path = self._settings_path
        advice = "--force goes on and mixes them; else name another output"
        try:
            known = json.loads(read_input(path))
            if not isinstance(known, dict):
                raise ValueError(f"expected an object, found {type(known).__name__}")
        except (OSError, ValueError, RecursionError) as error:
            raise JobError(f"{self.path} has answers, but {path.name} does not say how they were made; "
                           f"{advice}") from error
        batch = known.pop("batch", None)
        self.batch = batch if type(batch) is int and batch > 0 else None
        for name in (*self.settings, *known):
            before, now = known.get(name), self.settings.get(name)
            if before == now:
                continue
            if name not in known:
                raise JobError(f"{path.name} does not say with which {name} the answers in {self.path} were made; "
                               f"{advice}")
            how = DIFFERENT.get(name, f"with {name} {before!r}, this job has {now!r}")
            raise JobError(f"the answers in {self.path} were made {how}; {advice}")

    def _check_torn_line(self, end: int) -> None:
        """Refuse a file whose bytes from `end` on cannot be the rest of an answer, and so must not be cut off."""
        head = read_whole(self._fd, len(BEGINNING), end)
        begins = all(found in (0, wanted) for found, wanted in zip(head, BEGINNING, strict=False))
        if head and not (begins and (self.answered or self._settings_path.exists())):
            raise JobError(f"{self.path} ends in text that is no part of an answer of a job; name another output")

    def check_batch(self, batch: int | None) -> None:
        """Raise JobError if another number of slots is asked for than that of the answers there: rounding depends on
        it."""
        if batch is not None and not self.force and self.batch not in (None, batch):
            raise JobError(f"the answers in {self.path} were made in batches of {self.batch}, this job has {batch}; "
                           "--force goes on and mixes them; else leave --batch out, or name another output")

    def note_batch(self, batch: int) -> None:
        """Note that prompts are answered in `batch` slots from here on."""
        self.batch = batch
        if self.resumable:
            self._write_settings()

    def _write_settings(self) -> None:
        path = self._settings_path
        settings = self.settings | ({} if self.batch is None else {"batch": self.batch})
        try:
            write_json(path, settings)  # on disk before the first answer: it says how that was made
        except OSError as error:
            raise JobError(f"cannot write {path}: {error.strerror}") from error

    def check_questions(self, requests: Iterable[PromptLine]) -> None:
        """Raise JobError if an id was answered for another question than the one it has now."""
        for request in requests:
            known = self.answered.get(request.id)
            if known is not None and known != request.question:
                raise JobError(f"{request.unit} {request.line}: id {request.id!r} is in {self.path} with another "
                               "question; give changed prompts new ids, or name another output")

    def write(self, answer: Mapping[str, Any]) -> None:
        """Append one answer as one line; if that fails part-way, take the part back and raise OSError."""
        line = json.dumps(answer, ensure_ascii=False).encode("utf-8") + b"\n"
        before = os.fstat(self._fd).st_size
        with naming(self.path):
            try:
                left = memoryview(line)
                while left:  # what stops a write half-way is said when the rest is tried
                    done = os.write(self._fd, left)
                    if done == 0:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    left = left[done:]
            except OSError:
                if self.resumable:
                    os.ftruncate(self._fd, before)
                raise
        name, question = _asked(answer)
        self.answered[name] = question

    def put_in_order(self, ids: Iterable[str | int]) -> None:
        """Rewrite the file with its answers in the order of `ids`, those of others last; whole or not at all."""
        if not self.resumable:
            return
        at, found = 0, list[tuple[int, int]]()  # places in the order and in the file
        order = {name: i for i, name in enumerate(ids)}
        with open(self._fd, "rb", closefd=False) as file, naming(self.path):
            file.seek(0)
            for line in file:
                found.append((order.get(_asked(json.loads(line))[0], len(order)), at))
                at += len(line)
            if found == sorted(found):
                return
            with written_whole(self.path, "wb") as sorted_file:
                for _, start in sorted(found):
                    file.seek(start)
                    sorted_file.write(file.readline())

    def flush(self) -> None:
        """Make what was written survive a loss of power."""
        if self.resumable:
            with naming(self.path):
                os.fsync(self._fd)

    def close(self) -> None:
        try:
            self.flush()
        finally:
            os.close(self._fd)

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def refuse_overwriting(prompts: Path, output: Path) -> None:
    """Raise JobError if a job's answers, or its settings beside them, would be written into its prompts."""
    for path in (output, output.with_name(output.name + SETTINGS_SUFFIX)):
        if prompts.is_file() and path.exists() and path.samefile(prompts):
            raise JobError(f"{prompts} holds the prompts, and {path} is the same file; name another output")


class Model(Protocol):
    """The methods of a language model that a job needs."""

    def answer_all(
        self, asked: Sequence[Request], sampling: Sampling, eos: frozenset[int], *, on_end: OnEnd, on_step: OnStep
    ) -> WorkDone: ...

    def check_files(self) -> None:
        """Raise if the files that answers are computed from are no longer those that were opened."""


def run_job(
    model: Model,
    prompts: Sequence[Prompt],
    output: AnswerFile,
    ask: Ask,
    decode: Callable[[list[int]], str],
    *,
    codec: TextCodec | None = None,
    stop: Callable[[], bool] = lambda: False,
    progress: OnStep = lambda work: None,
    adapters: Container[str] = (),
    features: Callable[[Prompt], PromptFeatures] | None = None,
) -> WorkDone:
    """Answer the prompts that are not answered yet, each answer written the moment its sequence ends.

    `progress` is called after every step. When `stop` turns true the step under way is completed and Interrupted
    raised. No answer is written unless the model's files are still those that it was opened with. Lines of OpenAI's
    batch form and grammars need a `codec`. Of `adapters` a line may name one. Images of a line need `features`.
    """
    left = pending(prompts, output.answered)
    if not left:
        return WorkDone()
    flushed_s = time.monotonic()
    asked: list[Request] = []
    ends: list[Callable[[list[int]], None]] = []  # what is done with the tokens of each
    for prompt in left:
        new_tokens = prompt.request.max_new_tokens or ask.max_new_tokens
        own: dict[str, Any] = {
            "adapter": prompt.request.adapter if prompt.request.adapter in adapters else "",
            "features": partial(features, prompt) if features is not None and prompt.request.pictured else None}
        if prompt.request.batch is not None and codec is not None:
            answer = BatchAnswer(str(prompt.request.id), prompt.request.batch, prompt.ids, new_tokens, ask.sampling,
                                 codec, frozenset(ask.eos))
            asked += [replace(each, **own) for each in answer.requests(partial(_draws, ask.seed, prompt.request.id))]
            ends += [partial(_end_batch, output, ask.model, answer, number) for number in range(
                answer.inquiry.choices)]
            continue
        constrain = None if ask.grammar is None or codec is None else partial(codec.structured.constraint, ask.grammar)
        asked.append(Request(torch.tensor(prompt.ids), new_tokens, partial(_draws, ask.seed, prompt.request.id),
                             constraint=constrain, **own))
        ends.append(partial(_write_answer, prompt, output, ask, decode))

    def on_end(number: int, ids: list[int]) -> None:
        model.check_files()
        ends[number](ids)

    def on_step(work: WorkDone) -> None:
        nonlocal flushed_s
        if time.monotonic() - flushed_s > FLUSH_S:
            output.flush()
            flushed_s = time.monotonic()
        progress(work)
        if stop():
            raise Interrupted

    work = model.answer_all(asked, ask.sampling, frozenset(ask.eos), on_end=on_end, on_step=on_step)
    output.flush()
    return work


def _end_batch(output: AnswerFile, model: str, answer: BatchAnswer, number: int, ids: list[int]) -> None:
    """Write the line of a batch request with its last answer."""
    if answer.end(number, ids):
        output.write(answer.line(model))


def pending(prompts: Iterable[Prompt], answered: Container[str | int]) -> list[Prompt]:
    """The prompts without an answer."""
    return [p for p in prompts if p.request.id not in answered]


def _draws(seed: int, name: str | int, number: int = 0) -> torch.Generator:
    """The generator of one answer's draws, which depend on the seed, the prompt's id and the answer's number alone."""
    digest = hashlib.sha256(json.dumps([seed, name, *([number] if number else [])]).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _write_answer(
    prompt: Prompt, output: AnswerFile, ask: Ask, decode: Callable[[list[int]], str], ids: list[int]
) -> None:
    stopped = ids[-1] in ask.eos
    text = decode(ids[:-1] if stopped else ids)
    output.empty += not text.strip()
    output.write({
        "id": prompt.request.id, **prompt.request.question, **prompt.request.carried, "text": text,
        "tokens": len(ids), "prompt_tokens": len(prompt.ids), "finish": "stop" if stopped else "length"})
