"""`forebay run`: answer the prompts of a file, or one on the command line."""

from __future__ import annotations

import json
import signal
import time
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.commands.chat import NEW_TOKENS as ONE_PROMPT
from forebay.commands.machine import machine_profile
from forebay.commands.options import (
    BudgetOption,
    DebugOption,
    ModelArgument,
    in_input,
    in_output,
    in_sampling,
    model_folder,
    named_budget,
    panel_option,
    prepare_draft,
    require_picture,
    require_writable,
    with_options,
)
from forebay.commands.ranks import among_ranks, as_first_rank, of_this_rank
from forebay.commands.seen_speeds import note_speed
from forebay.commands.terminal import JobError, clean_errors, doing, say, stopping
from forebay.rewriter.planning.options import Options

if TYPE_CHECKING:
    from forebay.commands import jobs
    from forebay.commands.job_images import JobImages
    from forebay.commands.prompts import Prompt
    from forebay.language_model import LanguageModel
    from forebay.rewriter.ir.plan import Plan

in_memory = panel_option("Memory")

SOME_UNANSWERED = 3  # exit code
NEW_TOKENS = 512  # of an answer to a prompt of a file, where nobody says


@with_options(leave=("prompt", "typical", "batch_slots", "plan"), said={
    "batch": "the planner's choice; others follow as some end",
    "new_tokens": f"{NEW_TOKENS} for prompts of a file, {ONE_PROMPT} for one"},
    defaults={"prompt_lookup_num_tokens": "auto"})
def run(
    model: ModelArgument,
    options: Options,
    prompt: Annotated[str | None, typer.Argument(metavar='["PROMPT"]', help="One prompt, answered on the terminal.")]
    = None,
    prompts: Annotated[Path | None, in_input(help="Prompts: JSON lines, CSV, TSV, Parquet, or a saved data set. A row "
             "has \"prompt\" or \"messages\", and may have \"id\" and \"max_new_tokens\"; or it is of OpenAI's batch "
             "form.")] = None,
    image: Annotated[list[str] | None, in_input(help="Image file in front of the prompt; repeat for several.")] = None,
    video: Annotated[list[str] | None, in_input(help="Video file in front of the prompt, after images; repeat for "
             "several.")] = None,
    column: Annotated[str | None, in_input(help='Column of the prompts. Default: "prompt" or "messages".',
        show_default=False)] = None,
    system: Annotated[str | None, in_input(help="System message before each prompt of a file.")] = None,
    output: Annotated[Path | None, in_output(
        help="JSONL file of answers. Prompts that it already answers are skipped.")] = None,
    budget: BudgetOption = None,
    plan: Annotated[Path | None, in_memory(help="Saved plan to replay; on several ranks a folder of plans.")] = None,
    save_plan: Annotated[Path | None, in_output(help="File for the plan; on several ranks a folder.")] = None,
    trace: Annotated[Path | None, in_output(
        help="File for a trace of planned and actual steps, for ui.perfetto.dev.")] = None,
    picture: Annotated[Path | None, in_output(
        metavar="OUT.png", help="Picture of the memory over time, planned and measured.")] = None,
    chat: Annotated[bool | None, in_input("--chat/--no-chat",
        help="Chat template of the model around each prompt. Default: where the model has one.",
        show_default=False)] = None,
    sample: Annotated[bool, in_sampling("--sample", help="Sampled tokens instead of the most likely ones.")] = False,
    temperature: Annotated[float | None, in_sampling(
        help="Temperature of sampling; 0 takes the most likely tokens. Implies --sample.")] = None,
    top_k: Annotated[int | None, in_sampling(
        help="Number of most likely tokens to sample from; 0: all. Implies --sample.")] = None,
    top_p: Annotated[float | None, in_sampling(
        help="Probability mass of the tokens to sample from. Implies --sample.")] = None,
    seed: Annotated[int, in_sampling(help="Seed of sampling.")] = 0,
    unordered: Annotated[bool, in_output("--unordered",
        help="Answers in the order in which they end, not sorted as the prompts are once all are there.")] = False,
    json_schema: Annotated[Path | None, in_output(help="File with a JSON schema that answers hold to.")] = None,
    force: Annotated[bool, in_output("--force",
        help="Resume even if the existing answers have other settings.")] = False,
    verify: Annotated[bool, in_input("--verify",
        help="Comparison of every weight of a quantized model with its checksum, before the run.")] = False,
    as_json: Annotated[bool, in_output("--json", help="Measurements as JSON on stdout.")] = False,
    debug: DebugOption = False,
) -> None:
    """Answer one prompt, or a file of prompts. The same command resumes an interrupted job.

    Exit code: 0 all answered, 2 failed, 3 some lines could not be answered, 130 interrupted.

    \f
    Long: half of it is the options of its own.
    """
    with clean_errors(debug), among_ranks(options.mesh, output) as (mesh, output):
        from forebay.commands.chat import answer_one
        from forebay.commands.encoder_decoder import answer_encoded
        from forebay.commands.serve_texts import refuse_embedders
        from forebay.modules.encoder_decoder import is_encoder_decoder
        from forebay.runtime.run.sampling import Sampling

        drawing = temperature != 0 and (sample or any(x is not None for x in (temperature, top_k, top_p)))
        try:
            sampling = Sampling(drawing, temperature or 1.0,
                                50 if top_k is None else top_k, 1.0 if top_p is None else top_p)
        except ValueError as error:
            raise JobError(str(error)) from error
        options = replace(options, mesh=mesh)
        media = [*(("image", each) for each in image or ()), *(("video", each) for each in video or ())]
        if prompt is not None:
            only = {"--prompts": prompts, "--output": output, "--plan": plan, "--save-plan": save_plan,
                    "--trace": trace, "--picture": picture, "--batch": options.batch,
                    "--json": as_json or None, "--verify": verify or None,
                    "--mesh": mesh, "--column": column, "--system": system, "--unordered": unordered or None,
                    "--json-schema": json_schema}
            for name, given in only.items():
                if given is not None:
                    raise JobError(f"{name} is for the prompts of a file; leave it or the prompt out")
            if is_encoder_decoder(folder := model_folder(model, options)):
                if media:
                    raise JobError(f"--{media[0][0]}: a model with an encoder and a decoder takes its PROMPT alone")
                answer_encoded(folder, prompt, budget, options, sampling, seed)
                return
            refuse_embedders(folder)
            answer_one(model, prompt, budget, options, sampling, seed, chat=chat, media=media)
            return
        from forebay.calibration import calibrated
        from forebay.commands import jobs
        from forebay.commands.job_images import JobImages
        from forebay.commands.plan_job import fit_job, prompt_room, unfit, with_reuse
        from forebay.commands.prompts import (
            encode,
            load_tokenizer,
            read_requests,
            refuse_adapters,
            stop_ids,
            takes_chats,
        )
        from forebay.commands.schema_file import read_schema
        from forebay.images.open_tower import takes_images
        from forebay.open_model import open_model
        from forebay.rewriter.ir.plan import Budget, PlanError, load_plan
        from forebay.rewriter.planning.options import check_choices, told_activations
        from forebay.runtime.disk.spill_file import require_spill_folder

        if media:
            raise JobError(f"--{media[0][0]} is for one PROMPT; lines of a file name {media[0][0]}s in their messages")
        if options.draft is not None and save_plan is not None:
            raise JobError("--save-plan: a plan is of one model; leave it or --draft out")
        if prompts is None or output is None:
            raise JobError('name a "PROMPT" to answer here, or a file of --prompts and an --output for the answers')
        plan, save_plan = of_this_rank(mesh, plan, "--plan"), of_this_rank(mesh, save_plan, "--save-plan")
        saved = load_plan(plan) if plan else None
        exported = _plan_of_bundle(model) if budget is None and saved is None else saved
        sizes = named_budget(budget) if budget or exported is None else Budget(
            exported.budget.device, exported.budget.host)
        require_spill_folder(sizes.disk)
        require_writable(trace, "--trace")
        require_picture(picture, "--picture")
        require_writable(save_plan, "--save-plan")
        if saved is not None and saved.budget != sizes.limits:
            raise PlanError(f"the plan {plan} was made for {saved.budget}, not for --budget {budget}; leave one out")
        if saved is not None:
            check_choices(saved.workload, options, saved)
        batch = options.batch
        jobs.refuse_overwriting(prompts, output)
        requests, bad = read_requests(prompts, column, system)
        if not requests and not bad:
            say(f"{prompts} holds no prompts: nothing to answer")
        folder = model_folder(model, options)
        refuse_embedders(folder)
        if is_encoder_decoder(folder):
            raise JobError("--prompts: a model with an encoder and a decoder answers one PROMPT here; batches go to "
                           "forebay.wrap")
        pictured = takes_images(folder) and any(request.pictured for request in requests)
        if pictured and (plan is not None or save_plan is not None):
            raise JobError("--plan and --save-plan are for jobs of text alone; leave them or the images out")
        with doing("capturing the model"):
            captured, checkpoint, files = open_model(folder, verify=verify, keep=options.of_one_model, embeds=pictured)
            tokenizer = load_tokenizer(folder)
            images = JobImages(folder, tokenizer) if pictured else None
            eos = stop_ids(folder, tokenizer)
        options = calibrated(options, checkpoint.fingerprint, captured.dtype)
        new_tokens = options.new_tokens or (exported.workload.new_tokens if exported else min(
            NEW_TOKENS, captured.max_positions // 2 or NEW_TOKENS))
        options = replace(options, new_tokens=new_tokens)
        most = prompt_room(captured.max_positions, saved, new_tokens)
        chat = takes_chats(tokenizer, True if system is not None else chat)
        encoded, more = encode(requests, tokenizer, chat=chat, vocab_size=captured.vocab_size, most_tokens=most,
                               images=None if images is None else images.ids)
        bad += more
        encoded, more = refuse_adapters(encoded, captured.adapters)
        bad += more
        grammar = None if json_schema is None else read_schema(json_schema)
        ask = jobs.Ask(new_tokens, eos, sampling, seed, Path(model).expanduser().resolve().name, grammar)
        kept = options if saved is None else options.as_planned(saved)
        kept = replace(kept, activations=told_activations(kept.activations, captured.dtype))
        settings = jobs.job_settings(checkpoint, tokenizer, ask, kept, chat=chat)
        with jobs.AnswerFile(output, settings, force=force) as answers:
            answers.answered, answers.batch = as_first_rank(mesh, answers.answered, answers.batch)
            answers.check_questions(requests)
            left = jobs.pending(encoded, answers.answered)
            known = {request.line for request in requests if request.id in answers.answered}
            bad = [line for line in bad if line.line not in known]
            if answers.cut_nbytes:
                say(f"{output}: cut off {answers.cut_nbytes} bytes of an unfinished line")
            if known:
                say(f"{output}: {len(known)} of {len(requests)} prompts are answered already")
            if left:
                options = replace(options, machine=machine_profile(options, folder), plan=saved)
                if images is None:
                    options = with_reuse(options, left)
                else:
                    sizes, options = images.reserve((captured, checkpoint, files), sizes, options, left)
                answers.check_batch(batch if saved is None else saved.workload.batch)
                prepare_draft(options.draft, folder, sizes.device)
                lm, fitting = fit_job((captured, checkpoint, files), encoded, sizes, options, answers.batch)
                if options.draft is not None:
                    say(f"draft: {lm.draft_summary}")
                if batch is None and answers.batch not in (None, lm.plan.workload.batch):
                    say(f"{output}: going on with {lm.plan.workload.batch} prompts at once, not with {answers.batch}, "
                        "which do not fit: what is computed may differ by rounding")
                answers.note_batch(batch or lm.plan.workload.batch)
                bad += unfit(left, fitting, lm.plan, new_tokens, batch)
                if save_plan:
                    lm.plan.save(save_plan)
                if jobs.pending(fitting, answers.answered):
                    with lm, nullcontext() if images is None else closing(images):
                        _answer(lm, fitting, answers, ask, tokenizer, (trace, picture), as_json, images)
                    _say_empty(answers.empty, chat)
            if not unordered:
                answers.put_in_order(request.id for request in requests)
        for line in sorted(bad, key=lambda b: b.line):
            say(f"{prompts} {line.unit} {line.line}: {line.reason}")
        if bad:
            answered = sum(request.id in answers.answered for request in requests)
            say(f"{len(bad)} {bad[0].unit}s of {prompts} were not answered; {answered} were")
            raise typer.Exit(SOME_UNANSWERED)


def _plan_of_bundle(model: str) -> Plan | None:
    """The plan that lies in the bundle `model`, if it is one."""
    from forebay.exported.bundle import is_bundle
    from forebay.exported.start import stored_plan

    folder = Path(model).expanduser()
    return stored_plan(folder) if is_bundle(folder) else None


def _answer(
    lm: LanguageModel, encoded: list[Prompt], answers: jobs.AnswerFile, ask: jobs.Ask, tokenizer: Any,
    records: tuple[Path | None, Path | None], as_json: bool, images: JobImages | None,
) -> None:
    """Run the job with a progress bar, then print planned and measured figures; `records` are the files for its trace
    and its picture."""
    from forebay.commands import jobs
    from forebay.commands.chat_template import ChatTemplate
    from forebay.commands.job_measures import Spent, constant_nbytes, job_measures, measures_text
    from forebay.commands.job_progress import JobProgress
    from forebay.commands.process_memory import MemoryWatch, disk_read_nbytes
    from forebay.drafting import files_in_budget
    from forebay.runtime.disk.page_cache import drop_file
    from forebay.runtime.run.progress import WorkDone
    from forebay.serving.text_codec import TextCodec

    trace, picture = records
    total = len(jobs.pending(encoded, answers.answered))
    codec = TextCodec(tokenizer, ChatTemplate(tokenizer), lm.captured.vocab_size, ask.eos)
    if trace:
        lm.start_trace()
    read_before, began, done, spent = disk_read_nbytes(), time.monotonic(), WorkDone(), Spent()
    for path in (files := files_in_budget(lm)):
        drop_file(path)  # what others left in the page cache would be memory beyond the budget
    with stopping() as stopped, MemoryWatch(files) as memory, JobProgress(total) as shown:
        _ = lm.session  # takes memory; what is resident is read while the first prompts run
        started = spent.mark("load_s", began)

        def progress(now: WorkDone) -> None:
            nonlocal done, started
            started = spent.mark("prefill_s" if now.prefills > done.prefills else "decode_s", started)
            spent.move("prefill_s", "load_s", lm.session.take_waited_s())
            done = replace(now)
            shown.show(now)

        try:
            jobs.run_job(lm, encoded, answers, ask, codec.decode, codec=codec, stop=lambda: bool(stopped),
                         progress=progress, adapters=lm.captured.adapters,
                         features=None if images is None else partial(images.features, lm))
        except (jobs.Interrupted, KeyboardInterrupt):
            left = len(jobs.pending(encoded, answers.answered))
            say(f"interrupted: {len(encoded) - left} of {len(encoded)} answers are in {answers.path}; "
                      "run the same command again for the rest")
            raise typer.Exit(128 + (stopped[0] if stopped else signal.SIGINT)) from None
        finally:
            elapsed_s = time.monotonic() - began
            try:
                if trace and (gone := lm.save_trace(trace)):
                    say(f"{trace}: the first {gone} launches, waits and copies are left out")
            finally:
                lm.close()
    constant = constant_nbytes(lm, memory, encoded, total, ask, traced=trace is not None,
                               images_nbytes=0 if images is None else images.nbytes)
    measured = job_measures(lm, done, spent, elapsed_s, memory, disk_read_nbytes() - read_before, constant)
    if picture:
        from forebay.commands.pictures import draw_run

        draw_run(lm.plan, memory, measured["constant_nbytes"], picture)
    note_speed(lm.plan, done.tokens - done.ended, spent.decode_s)  # an answer's first token is its prompt's
    print(json.dumps(measured, indent=1) if as_json else measures_text(measured))


def _say_empty(count: int, chat: bool) -> None:
    """Say how many answers have no text, of which a reader of the file would otherwise never hear."""
    if count:
        say(f"{count} answers are empty: the model ended them at once"
            + ("" if chat else "; a model trained on chats needs its chat template (--chat)"))
