"""A model that talks: one prompt answered as its tokens come, or a conversation."""

from __future__ import annotations

import select
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from forebay.commands.machine import machine_profile
from forebay.commands.options import (
    BudgetOption,
    DebugOption,
    ModelArgument,
    in_input,
    in_sampling,
    model_folder,
    named_budget,
    prepare_draft,
    require_writable,
    with_options,
    within_positions,
)
from forebay.commands.seen_speeds import note_speed
from forebay.commands.terminal import JobError, ProgressLines, clean_errors, doing, print_answer, say
from forebay.rewriter.planning.options import Options, check_choices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from forebay.images.chats import ImageChats
    from forebay.language_model import LanguageModel
    from forebay.rewriter.ir.plan import Plan
    from forebay.runtime.run.next_turns import NextTurns
    from forebay.runtime.run.sampling import Sampling

FIRST_PROMPT = 256  # tokens of conversation that the first plan is for; each further plan is for twice what is needed
NEW_TOKENS = 256  # of an answer, where nobody says
MEDIA_LINES = ("/image", "/video")  # first words


@with_options(leave=("batch", "prompt", "typical", "batch_slots", "plan", "mesh"), said={"new_tokens": f"{NEW_TOKENS}"},
              defaults={"prompt_lookup_num_tokens": "auto", "prefix_cache": "256MiB"})
def chat(
    model: ModelArgument,
    options: Options,
    budget: BudgetOption = None,
    system: Annotated[str | None, in_input(help="System message before the conversation.")] = None,
    session: Annotated[Path | None, in_input(
        help="File that keeps the conversation, and the KV cache of its prompts, from one run to the next.")] = None,
    temperature: Annotated[float, in_sampling(help="Temperature of sampling; 0 takes the most likely tokens.")] = 0.7,
    top_p: Annotated[float, in_sampling(help="Probability mass of the tokens to sample from.")] = 0.9,
    seed: Annotated[int, in_sampling(help="Seed of sampling.")] = 0,
    debug: DebugOption = False,
) -> None:
    """Chat with MODEL until the end of the input (Ctrl-D).

    A line /image FILE or /video FILE is for the next message.
    """
    with clean_errors(debug):
        from forebay.commands.chat_template import ChatTemplate
        from forebay.commands.plain_tokenizer import plain_tokenizer
        from forebay.commands.prompts import PromptLine, load_tokenizer, prompt_ids
        from forebay.images.chats import ImageChats
        from forebay.images.parts import with_media
        from forebay.runtime.run.next_turns import NextTurns
        from forebay.runtime.run.sampling import Sampling

        try:
            sampling = Sampling(temperature != 0, temperature or 1.0, 0, top_p)
        except ValueError as error:
            raise JobError(str(error)) from error
        require_writable(session, "--session")
        folder = model_folder(model, options)
        tokenizer = plain_tokenizer(folder) or load_tokenizer(folder)
        if not getattr(tokenizer, "chat_template", None):
            raise JobError(f"the tokenizer of {model} has no chat template; try forebay run {model} \"a prompt\"")
        with (ChatTemplate(tokenizer) as template,
              _planned(folder, budget, options, NEW_TOKENS) as lm):
            messages = conversation(lm, session, system)
            chats, turns = ImageChats(folder, template), NextTurns()
            kinds, media = list[str](), list[Any]()  # of the next message, of all
            for turn, line in enumerate(_lines(lm, turns), sum(each["role"] == "user" for each in messages)):
                if line.split()[0] in MEDIA_LINES:
                    if (opened := _opened_line(chats, line, session)) is not None:
                        kinds.append(line[1:].partition(" ")[0])
                        media.append(opened)
                    continue
                messages.append({"role": "user", "content": with_media(line, kinds) if kinds else line})
                kinds = []
                ids, given = chats.ids(messages, media) if media else (
                    prompt_ids(PromptLine(turn, turn, messages=messages), tokenizer, template), {})
                text, new_ids = _stream(lm, tokenizer, ids, options.new_tokens, sampling, seed + turn, given)
                turns.note([*ids, *new_ids], "")
                messages.append({"role": "assistant", "content": text})
                if session is not None:
                    lm.save_session(session, messages)


def _opened_line(chats: ImageChats, line: str, session: Path | None) -> Any:
    """The image or the video that a line names; None, and it says why, where that cannot be."""
    if session is not None:
        say("a session keeps text alone: leave --session out")
        return None
    kind, _, source = line[1:].partition(" ")
    if not source.strip():
        say(f"/{kind} needs a file: /{kind} FILE")
        return None
    try:
        return chats.open({"type": kind, kind: source.strip()})
    except JobError as error:
        say(str(error))
        return None


def conversation(lm: LanguageModel, session: Path | None, system: str | None) -> list[dict[str, Any]]:
    """The messages of a session's file, if there is one; else of a new conversation."""
    begun = [] if system is None else [{"role": "system", "content": system}]
    if session is None or not session.exists():
        return begun
    said = lm.load_session(session)
    if not isinstance(said, list) or not all(
            isinstance(each, dict) and {*each} == {"role", "content"} for each in said):
        raise JobError(f"{session} holds no conversation; name another file")
    if begun and said[:1] != begun:
        raise JobError(f"--system: the conversation in {session} has another system message; leave it out")
    say(f"{session}: going on after {len(said)} messages")
    return said


def answer_one(
    model: str, prompt: str, budget: str | None, options: Options, sampling: Sampling, seed: int, *, chat: bool | None,
    media: Sequence[tuple[str, str]] = (),
) -> None:
    """Print the answer to one prompt as its tokens come, then to stderr what time it took. In front of the prompt are
    `media`: pairs of "image" or "video" and a file."""
    from forebay.commands.chat_template import ChatTemplate
    from forebay.commands.plain_tokenizer import plain_tokenizer
    from forebay.commands.prompts import PromptLine, load_tokenizer, prompt_ids, takes_chats
    from forebay.exported.bundle import is_bundle
    from forebay.exported.start import stored_plan

    if not prompt.strip():
        raise JobError("the prompt is empty")
    folder = model_folder(model, options)
    tokenizer = (None if media else plain_tokenizer(folder)) or load_tokenizer(folder)
    chat = takes_chats(tokenizer, chat)
    given: dict[str, Any] = {}
    with ChatTemplate(tokenizer) as template:
        if media:
            from forebay.images.chats import ImageChats
            from forebay.images.parts import with_media

            if not chat:
                kind = media[0][0]
                raise JobError(f"--{kind}: {kind}s go through the chat template of the model; leave --no-chat out")
            chats = ImageChats(folder, template)
            opened = [chats.open({"type": kind, kind: source}) for kind, source in media]
            messages = [{"role": "user", "content": with_media(prompt, [kind for kind, _ in media])}]
            ids, given = chats.ids(messages, opened)
        else:
            ids = prompt_ids(PromptLine(1, 1, prompt), tokenizer, template, chat)
    most = stored_plan(folder).workload.new_tokens if is_bundle(folder) else NEW_TOKENS
    with _planned(folder, budget, replace(options, prompt=len(ids)), most) as lm:
        _stream(lm, tokenizer, ids, options.new_tokens, sampling, seed, given)


def _planned(folder: Path, budget: str | None, options: Options, new_tokens: int) -> LanguageModel:
    """The model planned for one sequence, of `new_tokens` where nobody names more or less; within half of the memory
    that is free where no budget is named. A bundle's own plan is taken where it serves the options."""
    from forebay.api import plan_opened
    from forebay.exported.bundle import is_bundle
    from forebay.exported.start import open_bundle, stored_plan
    from forebay.open_model import open_model
    from forebay.rewriter.ir.plan import Budget
    from forebay.runtime.disk.spill_file import require_spill_folder

    saved = stored_plan(folder) if budget is None and is_bundle(folder) and options.draft is None and (
        options.cache_dir is None) else None
    if saved is not None and _serves(saved, replace(options, prompt=options.prompt or FIRST_PROMPT,
                                                    new_tokens=options.new_tokens or new_tokens)):
        return open_bundle(folder, machine=machine_profile(options, folder), prefix_cache=options.prefix_cache)
    sizes = named_budget(budget) if saved is None else Budget(saved.budget.device, saved.budget.host)
    require_spill_folder(sizes.disk)
    options = replace(options, machine=machine_profile(options, folder))  # may take seconds
    prepare_draft(options.draft, folder, sizes.device)
    with doing("capturing the model"):
        opened = open_model(folder, dequantize=options.dequantize, keep=options.of_one_model, adapter=options.adapter)
    options = within_positions(options, opened[0].max_positions, FIRST_PROMPT, new_tokens)
    with doing("planning"):
        lm = plan_opened(opened, sizes, options)
    if options.draft is not None:
        say(f"draft: {lm.draft_summary}")
    return lm


def _serves(plan: Plan, options: Options) -> bool:
    """Return whether a plan is for one sequence as long as is asked for, and keeps every other option."""
    work, prompt, new_tokens = plan.workload, options.prompt or 1, options.new_tokens or 1
    try:
        check_choices(work, options, plan)
    except ValueError:
        return False
    return work.batch == 1 and prompt <= work.prompt and prompt + new_tokens <= work.context


def _stream(
    lm: LanguageModel, tokenizer: Any, ids: list[int], asked: int | None, sampling: Sampling, seed: int,
    images: Mapping[str, Any],
) -> tuple[str, list[int]]:
    """Print an answer as its tokens come, and its time to stderr; returns its text and tokens. It has as many new
    tokens as are `asked` for, else as many as the plan and the model's positions hold. `images` are the processor's
    features of the prompt's images."""
    import torch

    from forebay.commands.prompts import check_ids, ids_text, stop_ids

    check_ids(ids, None, lm.captured.vocab_size)
    limit, new_tokens = lm.captured.max_positions, asked or lm.plan.workload.new_tokens
    if limit and asked is None:
        new_tokens = max(1, min(new_tokens, limit - len(ids)))
    if limit and len(ids) + new_tokens > limit:
        raise JobError(f"{len(ids)} tokens and an answer of {new_tokens} exceed the model's {limit} positions; " + (
            "begin anew" if asked is None else "ask for less with --new-tokens" + (
                ", or begin anew" if len(ids) < limit else "")))
    if len(ids) > lm.plan.workload.prompt:
        most = limit - new_tokens if limit else 2 * len(ids)
        lm.reserve(1, min(2 * len(ids), most), new_tokens)
    began = time.monotonic()
    if not images:  # else the tower comes first
        _ = lm.session  # takes memory
    times = [time.monotonic()]
    made: list[int] = []
    shown, waiting = "", ProgressLines()

    def on_token(column: torch.Tensor) -> None:
        nonlocal shown
        waiting.stop()
        times.append(time.monotonic())
        made.append(int(column[0]))
        text = ids_text(tokenizer, made)
        if text.startswith(shown) and not text.endswith("\ufffd"):  # else the next token may complete a character
            print_answer(text[len(shown) :], end="")
            shown = text

    with waiting:
        if not sys.stderr.isatty():
            waiting.add_task("reading the weights and the prompt")
        _generate(lm, ids, new_tokens, stop_ids(lm.checkpoint.folder, tokenizer), sampling,
                  torch.Generator().manual_seed(seed), on_token, images)
    text = ids_text(tokenizer, made)
    print_answer(text.removeprefix(shown))
    first, last, count = times[1], times[-1], len(times) - 1
    say(f"{count} tokens: {times[0] - began:.1f} s to load, {first - times[0]:.1f} s of prefill, {last - first:.1f} s "
        "of decode" + (f" ({(count - 1) / (last - first):.1f} tokens/s)" if count > 1 else "")
        + (f"; {lm.tally}" if lm.tally.steps else ""))
    note_speed(lm.plan, count - 1, last - first)
    return text, made


def compute_ahead(lm: LanguageModel, turns: NextTurns, until: Callable[[], bool]) -> None:
    """Compute the beginning of the next prompt, a block at a time, until `until` says that something else waits."""
    import torch

    from forebay.runtime.run.generation import Stop, generate_as_planned
    from forebay.runtime.run.progress import WorkDone
    from forebay.runtime.run.sampling import Sampling

    if not turns:
        return
    work = lm.plan.workload
    with lm.running(1, work.prompt, work.new_tokens, continuous=True) as session:
        while not until() and (request := turns.next(session.prefixes, lm.plan)) is not None:
            generate_as_planned(session, [request.ids], Sampling(), Stop(1, frozenset(), 0), torch.Generator(),
                                lambda column: None, WorkDone(), None)


def _generate(
    lm: LanguageModel, ids: list[int], new_tokens: int, eos: tuple[int, ...], sampling: Sampling,
    draws: torch.Generator, on_token: Callable[[torch.Tensor], None], images: Mapping[str, Any],
) -> None:
    """The answer to one prompt, by the runtime's loop alone where nothing more is asked: transformers' takes seconds to
    load, and ends in the same loop."""
    import torch

    from forebay.drafting import drafting
    from forebay.huggingface.served import asks_nothing_more
    from forebay.runtime.run.generation import Stop, generate_as_planned
    from forebay.runtime.run.progress import WorkDone

    if images or not asks_nothing_more(lm.checkpoint.folder) or lm.captured.rope_switch_length:
        drawing = vars(sampling) if sampling.do_sample else {"do_sample": False}
        lm.generate([ids], max_new_tokens=new_tokens, eos_token_id=list(eos) or None, on_token=on_token,
                    generator=draws, **drawing, **images)
        return
    with lm.running(1, len(ids), new_tokens, continuous=True) as session:
        lm.tally = WorkDone()
        rows, stop = [torch.tensor(ids)], Stop(new_tokens, frozenset(eos), eos[0] if eos else 0)
        with drafting(lm.helper, session, rows, new_tokens, sampling, draws) as drafter:
            generate_as_planned(session, rows, sampling, stop, draws, on_token, lm.tally, drafter)


def _line_waits() -> bool:
    """Return whether a line was typed."""
    return bool(select.select([sys.stdin], [], [], 0)[0])


def _lines(lm: LanguageModel, turns: NextTurns) -> Iterator[str]:
    """Yield typed or piped lines without the empty ones; until a line is typed, `turns` are computed."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
            compute_ahead(lm, turns, _line_waits)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()
