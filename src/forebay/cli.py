"""The `forebay` command: run, plan, explain, machine."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.terminal import clean_errors, console, progress_bar, say, stopping

if TYPE_CHECKING:
    from forebay import jobs
    from forebay.memory import MemoryWatch
    from forebay.model import LanguageModel
    from forebay.prompts import Prompt
    from forebay.rewriter.machine import Machine
    from forebay.rewriter.plan import Plan

SOME_UNANSWERED = 3  # exit code
DEFAULT_BATCH = 8

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
                  help="Run language models larger than the fast memory you have.")

ModelArgument = Annotated[str, typer.Argument(
    metavar="MODEL", help="A folder with a safetensors checkpoint, a .gguf file, or 'demo'.")]
BudgetOption = Annotated[str | None, typer.Option(
    "--budget", metavar="TIER=SIZE,…", help="What may be used, e.g. device=120MiB,host=2GB,disk=/path.")]
MachineOption = Annotated[Path | None, typer.Option("--machine", help="A machine profile to use instead of this "
                                                    "machine's own.")]
SlotsOption = Annotated[int | None, typer.Option(min=1, help="Staging slots; the planner chooses by default.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


def main() -> None:
    """The console script: sets what must be in the environment before torch is loaded, then runs the command."""
    os.environ.setdefault("GOMP_SPINCOUNT", "0")  # spinning OpenMP threads take the core the disk reader needs
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are folders and files; nothing is fetched
    app()


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(importlib.metadata.version("forebay"))
        raise typer.Exit


@app.command()
def run(
    model: ModelArgument,
    prompts: Annotated[Path, typer.Option(help='JSONL: {"prompt": "…"} or {"messages": […]}, optionally "id".')],
    output: Annotated[Path, typer.Option(help="JSONL of answers; what it holds already is not done again.")],
    budget: BudgetOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 64,
    batch: Annotated[int | None, typer.Option(min=1, help="Prompts at once (default: 8, fewer if they do not fit).")]
    = None,
    slots: SlotsOption = None,
    plan: Annotated[Path | None, typer.Option(help="Replay this saved plan.")] = None,
    save_plan: Annotated[Path | None, typer.Option(help="Write the plan to this file.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write planned and actual lanes for ui.perfetto.dev.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt into the model's chat template.")] = False,
    sample: Annotated[bool, typer.Option("--sample", help="Draw tokens instead of taking the most likely.")] = False,
    temperature: Annotated[float | None, typer.Option(help="Implies --sample.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Implies --sample; 0: all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Implies --sample.")] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Go on though the answers there have other settings.")] = False,
    machine: MachineOption = None,
    debug: DebugOption = False,
) -> None:
    """Answer the prompts of a file; interrupted, the same command goes on where it stopped.

    Exit code: 0 all answered, 2 failed, 3 some lines could not be answered, 130 interrupted.
    """
    with clean_errors(debug):
        from forebay import jobs
        from forebay.model import open_model
        from forebay.prompts import JobError, encode, load_tokenizer, read_requests, stop_ids
        from forebay.rewriter.plan import PlanError, load_plan
        from forebay.rewriter.sizes import parse_budget
        from forebay.runtime.sampling import Sampling

        saved = load_plan(plan) if plan else None
        if budget is None and saved is None:
            raise PlanError("say how much memory may be used, as --budget device=120MiB, or name a --plan")
        sizes = parse_budget(budget) if budget is not None else saved.budget  # type: ignore[union-attr]
        if saved is not None and saved.budget != sizes:
            raise PlanError(f"the plan {plan} was made for {saved.budget}, not for --budget {budget}; leave one out")
        try:
            drawing = sample or any(x is not None for x in (temperature, top_k, top_p))
            sampling = Sampling(drawing, 1.0 if temperature is None else temperature,
                                50 if top_k is None else top_k, 1.0 if top_p is None else top_p)
        except ValueError as error:
            raise JobError(str(error)) from error
        requests, bad = read_requests(prompts)
        folder = _resolve(model)
        with console().status("capturing the model"):
            captured, checkpoint, files = open_model(folder)
            tokenizer = load_tokenizer(folder)
        most = _most_prompt_tokens(captured.max_positions, saved, max_new_tokens)
        encoded, more = encode(requests, tokenizer, chat=chat, most_tokens=most)
        bad += more
        settings = {"model": checkpoint.fingerprint, "max_new_tokens": max_new_tokens, "chat": chat,
                    "sampling": vars(sampling) | {"seed": seed} if sampling.do_sample else "greedy"}
        with jobs.AnswerFile(output, settings, force=force) as answers:
            answers.check_questions(p.request for p in encoded)
            left = jobs.pending(encoded, answers.answered)
            if answers.cut_nbytes:
                say(f"{output}: cut off {answers.cut_nbytes} bytes of an unfinished line")
            if len(left) < len(encoded):
                say(f"{output}: {len(encoded) - len(left)} of {len(encoded)} prompts are answered already")
            if left:
                profile = _profile(machine, folder)
                lm = _fit_batch((captured, checkpoint, files), encoded, sizes, max_new_tokens, batch, slots, saved,
                                profile)
                if save_plan:
                    lm.plan.save(save_plan)
                ask = jobs.Ask(max_new_tokens, stop_ids(folder, tokenizer), sampling, seed)
                with lm:
                    _answer(lm, encoded, answers, ask, tokenizer, trace)
        for line in sorted(bad, key=lambda b: b.line):
            say(f"{prompts} line {line.line}: {line.reason}")
        if bad:
            say(f"{len(bad)} lines of {prompts} were not answered; {len(encoded)} were")
            raise typer.Exit(SOME_UNANSWERED)


def _fit_batch(
    opened: tuple[Any, Any, Any], encoded: list[Prompt], sizes: Any, new_tokens: int, batch: int | None,
    slots: int | None, saved: Plan | None, machine: Machine,
) -> LanguageModel:
    """The model planned for the whole job; without a wish, the batch is halved until the budget holds it."""
    from forebay.model import LanguageModel
    from forebay.rewriter.plan import PlanError, Workload
    from forebay.rewriter.planner import Wishes

    if saved is not None:
        if batch is not None and batch != saved.workload.batch:
            raise PlanError(f"the plan is for batches of {saved.workload.batch}, not of {batch}; leave --batch out")
        return LanguageModel(*opened, sizes, saved.workload, Wishes(), machine, saved)
    longest = max(len(p.ids) for p in encoded)
    size = batch or min(DEFAULT_BATCH, len(encoded))
    while True:
        try:
            with console().status(f"planning for batches of {size}"):
                return LanguageModel(*opened, sizes, Workload(size, longest, new_tokens), Wishes(slots), machine)
        except PlanError:
            if batch is not None or size == 1:
                raise
            size //= 2


def _answer(
    lm: LanguageModel, encoded: list[Prompt], answers: jobs.AnswerFile, ask: jobs.Ask, tokenizer: Any,
    trace: Path | None,
) -> None:
    """Run the job with a progress bar, then say what was planned and what was measured."""
    from forebay import jobs
    from forebay.memory import MemoryWatch, disk_read_nbytes
    from forebay.prompts import make_batches
    from forebay.rewriter.explain import summarise_plan
    from forebay.runtime.page_cache import drop_file

    batches = make_batches(encoded, lm.plan.workload.batch)
    open_batches = [i for i, b in enumerate(batches) if jobs.pending(b, answers.answered)]
    total = len(jobs.pending(encoded, answers.answered))
    if trace:
        lm.start_trace()
    read_before, started, counts = disk_read_nbytes(), time.monotonic(), jobs.Counts()

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    files = {f.path for f in lm.files.values()}
    for path in files:
        drop_file(path)  # what others left in the page cache would be memory beyond the budget
    with stopping() as stopped, MemoryWatch(files) as memory, progress_bar() as bar:
        task = bar.add_task("answering", total=len(open_batches) * ask.max_new_tokens, note="")

        def progress(now: jobs.Counts, index: int, step: int) -> None:
            nonlocal counts
            counts = now
            rate = now.tokens / (time.monotonic() - started)
            bar.update(task, completed=open_batches.index(index) * ask.max_new_tokens + step,
                       note=f"{now.answers}/{total} answers, {rate:.2f} tokens/s")

        try:
            jobs.run_job(lm, batches, answers, ask, decode, stop=lambda: bool(stopped), progress=progress)
            bar.update(task, completed=len(open_batches) * ask.max_new_tokens)
        except (jobs.Interrupted, KeyboardInterrupt):
            left = len(jobs.pending(encoded, answers.answered))
            say(f"interrupted: {len(encoded) - left} of {len(encoded)} answers are in {answers.path}; "
                      "run the same command again for the rest")
            raise typer.Exit(128 + (stopped[0] if stopped else signal.SIGINT)) from None
        finally:
            elapsed_s = time.monotonic() - started
            if trace:
                lm.save_trace(trace)
            lm.close()
    print(summarise_plan(lm.plan))
    print(_measured(lm.plan, counts, elapsed_s, memory, disk_read_nbytes() - read_before))


def _measured(plan: Plan, counts: jobs.Counts, elapsed_s: float, memory: MemoryWatch, read_nbytes: int) -> str:
    from forebay.rewriter.sizes import format_nbytes as size

    grown = memory.peak - memory.before
    planned = sum(plan.prediction.peak_nbytes.values())
    return "\n".join((
        "",
        f"memory      budget {size(plan.budget.device)}, planned peak {size(planned)}, measured peak "
        f"{size(grown + memory.cached_peak)} ({size(grown)} of anonymous memory beyond the {size(memory.before)} that "
        f"Python had before, {size(memory.cached_peak)} of the model's file in the page cache)",
        f"process     {size(memory.peak)} of anonymous memory at the peak",
        f"streamed    {size(plan.prediction.streamed_nbytes)} per decode step as planned; "
        f"{size(read_nbytes)} fetched from disk in all, {size(read_nbytes // max(1, counts.steps))} per step",
        f"speed       {counts.answers} answers, {counts.tokens} tokens in {elapsed_s:.1f} s: "
        f"{counts.tokens / elapsed_s:.2f} tokens/s, {counts.steps / elapsed_s:.2f} steps/s",
    ))


@app.command("plan")
def plan_command(
    model: ModelArgument,
    budget: BudgetOption,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the longest prompt.")] = 64,
    new_tokens: Annotated[int, typer.Option("--new-tokens", "--max-new-tokens", min=1)] = 64,
    slots: SlotsOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    save: Annotated[Path | None, typer.Option(help="Write the plan to this file.")] = None,
    machine: MachineOption = None,
    debug: DebugOption = False,
) -> None:
    """Show what would go where, how much memory and time it takes, and the smallest budget; no weight is read."""
    with clean_errors(debug):
        from forebay.model import open_model
        from forebay.rewriter.explain import explain_plan
        from forebay.rewriter.pipeline import Pipeline
        from forebay.rewriter.plan import Workload
        from forebay.rewriter.planner import Wishes
        from forebay.rewriter.sizes import format_nbytes, parse_budget
        from forebay.rewriter.source import model_source
        from forebay.rewriter.switches import read_switches

        sizes, workload, wishes = parse_budget(budget), Workload(batch, prompt, new_tokens), Wishes(slots)
        folder = _resolve(model)
        profile = _profile(machine, folder)
        with console().status("capturing the model"):
            captured, checkpoint, files = open_model(folder)
        with console().status("planning"):
            source = model_source(captured, files, workload, checkpoint.fingerprint,
                                  host_hop=profile.device_kind != "cpu")
            pipeline = Pipeline(source, workload, profile, read_switches())
            made = pipeline.plan(sizes, wishes)
            smallest = pipeline.smallest_budget(wishes)
        if save:
            made.save(save)
        if as_json:
            print(made.to_json())
            return
        print(explain_plan(made, captured))
        print(f"smallest    a device budget of {format_nbytes(smallest)} ({smallest} bytes) would still work")


@app.command()
def explain(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan written by --save-plan or --save.")],
    memory: Annotated[Path | None, typer.Option(help="Draw the device arena over time to this PNG.")] = None,
    timeline: Annotated[bool, typer.Option("--timeline", help="The same as a coarse character picture.")] = False,
    debug: DebugOption = False,
) -> None:
    """Show a saved plan: a row per layer, what fills the memory, and the memory over time."""
    with clean_errors(debug):
        from forebay.rewriter.explain import explain_plan, memory_timeline
        from forebay.rewriter.plan import load_plan

        loaded = load_plan(plan)
        print(explain_plan(loaded))
        if timeline:
            print()
            print(memory_timeline(loaded))
        if memory:
            from forebay.pictures import draw_memory

            draw_memory(loaded, memory)
            say(f"wrote {memory}")


@app.command("machine")
def machine_command(
    folder: Annotated[Path, typer.Option(help="Where the disk tier would be.")] = Path("."),
    measure: Annotated[bool, typer.Option("--measure", help="Measure anew (about 40 s).")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False,
    debug: DebugOption = False,
) -> None:
    """Show what this machine's tiers and links can do, measured once and kept."""
    with clean_errors(debug):
        from forebay.rewriter.sizes import format_nbytes
        from forebay.runtime.measure import machine_cache_path

        if not folder.is_dir():
            raise NotADirectoryError(20, "not a folder", str(folder))
        known = machine_cache_path().exists() and not measure
        found = _profile(None, folder) if known else _measure(folder, quick=False)
        if as_json:
            print(found.to_json())
            return
        print(f"{found.name}: {found.device_kind}, {found.cores} cores, {found.threads} threads, measured {found.date}")
        for tier, facts in found.tiers.items():
            speed = f", read at {facts.bandwidth_bytes_per_s / 1e9:.2f} GB/s" if facts.bandwidth_bytes_per_s else ""
            print(f"tier {tier:<8}{format_nbytes(facts.capacity_nbytes)} free{speed}")
        for link in found.links:
            how = f"{link.method}, {link.depth} in flight of {format_nbytes(link.chunk_nbytes)}" if link.chunk_nbytes \
                else link.method
            print(f"link {link.src + ' to ' + link.dst:<18}{link.bandwidth_bytes_per_s / 1e9:6.2f} GB/s, "
                  f"{1e6 * link.latency_s:7.1f} us  ({how}; fit {link.r2:.3f})")
        kinds = sorted({(p.dtype, p.impl) for p in found.gemm})
        print("matrix products measured: " + ", ".join(f"{impl} in {dtype}" for dtype, impl in kinds))
        print(f"kept in {machine_cache_path()}; --measure measures anew")


def _profile(file: Path | None, folder: Path) -> Machine:
    """The profile in `file`, or this machine's own, measured quickly when there is none."""
    from forebay.rewriter.machine import load_machine
    from forebay.rewriter.plan import PlanError
    from forebay.runtime.measure import cached_machine, machine_cache_path

    if file is not None:
        try:
            return load_machine(file)
        except ValueError as error:
            raise PlanError(str(error)) from error
    if not machine_cache_path().exists():
        return _measure(folder, quick=True)
    with console().status("reading the machine profile (measured anew, in about 10 s, if the machine has changed)"):
        return cached_machine(_writable(folder))


def _measure(folder: Path, *, quick: bool) -> Machine:
    from forebay.rewriter.machine import save_machine
    from forebay.runtime.measure import machine_cache_path, measure_machine

    with progress_bar() as bar:
        task = bar.add_task("measuring this machine, once", total=1.0, note="")
        found = measure_machine(_writable(folder), quick=quick,
                                progress=lambda stage, done: bar.update(task, completed=done, note=stage))
        bar.update(task, completed=1.0, note="")
    save_machine(found, machine_cache_path())
    return found


def _writable(folder: Path) -> Path:
    """`folder`, or the cache's where a model lies that may not be written to: measuring needs a file there."""
    from forebay.rewriter.demo import cache_folder

    if os.access(folder, os.W_OK):
        return folder
    cache_folder().mkdir(parents=True, exist_ok=True)
    return cache_folder()


def _resolve(model: str) -> Path:
    """The model's folder, converted from GGUF with a progress bar where that is needed."""
    from forebay.rewriter.demo import resolve_model

    with progress_bar() as bar:
        task = bar.add_task("converting, once", total=None, visible=False, note="")
        return resolve_model(model, progress=lambda done, total: bar.update(
            task, completed=done, total=total, visible=True))


def _most_prompt_tokens(max_positions: int, saved: Plan | None, new_tokens: int) -> int:
    """The longest prompt that fits the model's positions and the saved plan; 0 for no limit."""
    from forebay.prompts import JobError

    limits = [max_positions - new_tokens] if max_positions else []
    if saved is not None:
        limits += [saved.workload.prompt, saved.workload.context - new_tokens]
    if limits and min(limits) < 1:
        raise JobError(f"--max-new-tokens {new_tokens} leaves no room for a prompt: "
                       + (f"the plan has {saved.workload.context} positions" if saved is not None else
                          f"the model has {max_positions} positions"))
    return min(limits, default=0)
