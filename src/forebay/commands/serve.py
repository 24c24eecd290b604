"""`forebay serve`: an OpenAI-compatible server for one model within a budget."""

from __future__ import annotations

import errno
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from forebay.commands.options import (
    BudgetOption,
    DebugOption,
    ModelArgument,
    model_folder,
    named_budget,
    panel_option,
    prepare_draft,
    with_options,
)
from forebay.commands.plan_serving import NEW_TOKENS, PROMPT
from forebay.commands.terminal import FAILED, JobError, clean_errors, reason_of, say
from forebay.rewriter.planning.options import Options

if TYPE_CHECKING:
    from forebay.commands.plan_serving import ServingGoals
    from forebay.language_model import LanguageModel
    from forebay.rewriter.ir.plan import Budget

in_network, in_goals, in_images, in_phases = map(panel_option, ("Network", "Goals", "Images", "Prefill and decode"))

PREFIX_CACHE = "256MiB"  # of prompts that need not be computed again


@with_options(leave=("batch", "typical", "plan", "mesh"), said={
    "batch_slots": "the planner's choice", "prompt": f"{PROMPT}", "new_tokens": f"{NEW_TOKENS}"},
    defaults={"prompt_lookup_num_tokens": "auto", "prefix_cache": PREFIX_CACHE})
def serve(
    model: ModelArgument,
    options: Options,
    budget: BudgetOption = None,
    host: Annotated[str, in_network(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, in_network(min=0, max=65535, help="Port; 0: any free one.")] = 8000,
    api_key: Annotated[str | None, in_network(envvar="FOREBAY_API_KEY", show_envvar=True,
        help="Key that requests must carry.")] = None,
    name: Annotated[str | None, in_network(help="Model name for clients. Default: MODEL's own.")] = None,
    ttft: Annotated[float | None, in_goals(metavar="MS",
        help="Goal: milliseconds to the first token, for 90 % of requests.")] = None,
    tpot: Annotated[float | None, in_goals(metavar="MS",
        help="Goal: milliseconds per further token, for 90 % of requests.")] = None,
    isl: Annotated[int | None, in_goals(min=1,
        help="Typical prompt of the goals, in tokens. Default: --prompt.")] = None,
    osl: Annotated[int | None, in_goals(min=1,
        help="Typical answer of the goals, in tokens. Default: --new-tokens.")] = None,
    queue: Annotated[int, in_network(min=0, help="Requests that may wait; more get status 429.")] = 64,
    grace: Annotated[float, in_network(min=0, help="Seconds to finish running requests after a stop signal.")] = 300.0,
    strict: Annotated[bool, in_network("--strict",
        help="Refuse requests with fields that are not served, which are otherwise passed over.")] = False,
    image_memory: Annotated[str | None, in_images(metavar="SIZE",
        help="Memory of the budget for the vision tower. Default: images are refused.")] = None,
    image_files: Annotated[bool, in_images("--image-files",
        help="Images from files of this machine too, which requests name; else data URLs alone.")] = False,
    role: Annotated[Literal["both", "prefill", "decode"], in_phases(
        help="Phases of requests that this process computes. Two processes with one --handoff share them.")] = "both",
    handoff: Annotated[str, in_phases(metavar="PATH",
        help="Socket at which prompts are handed on with their KV cache.")] = "forebay-decode.sock",
    debug: DebugOption = False,
) -> None:
    """Serve MODEL to OpenAI clients within a budget, until Ctrl-C or SIGTERM.

    Exit code: 0 stopped, 2 failed.

    \f
    Long: a third of it is the options of its own.
    """
    with clean_errors(debug):
        from forebay.commands.plain_tokenizer import plain_tokenizer
        from forebay.commands.plan_serving import plan_serving
        from forebay.commands.prompts import load_tokenizer, stop_ids
        from forebay.commands.serve_texts import reads_texts, serve_texts
        from forebay.huggingface.served import named_sampling
        from forebay.images.open_tower import model_type, takes_images, text_alone
        from forebay.serving.requests import default_sampling
        from forebay.serving.run_server import LOOPBACK, ServerRun, Service, ServingOptions, bound_socket

        sizes, image_nbytes = _without_images(named_budget(budget), image_memory, files=image_files)
        if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key
                                        and api_key):
            raise JobError("--api-key must be printable ASCII without spaces at its ends")
        goals = _goals(options.prompt or PROMPT, options.new_tokens or NEW_TOKENS, (ttft, tpot, isl, osl))
        if role == "decode":
            _decode(model, named_budget(budget), options, goals, handoff)
            return
        try:
            socket = bound_socket(host, port)
        except OSError as error:
            raise _cannot_listen(host, port, error) from error
        with socket:
            folder = model_folder(model, options)
            if image_nbytes and not takes_images(folder):
                raise JobError(text_alone(model_type(folder), "--image-memory"))
            alone = host in ("localhost", "127.0.0.1", "::1") and api_key is None
            hosts = frozenset(LOOPBACK) if alone else None
            named = name or Path(model).expanduser().resolve().name
            if api_key is None and not alone:
                say(f"whoever reaches {host} may use this server; --api-key asks for a key")
            if reads_texts(folder):
                serve_texts(folder, sizes, socket, ServingOptions(named, api_key, hosts), grace)
                return
            tokenizer = (None if image_nbytes else plain_tokenizer(folder)) or load_tokenizer(folder)
            prepare_draft(options.draft, folder, sizes.device)
            choice = plan_serving(folder, sizes, options, goals, images=bool(image_nbytes))
            _check_tower(choice.lm, image_nbytes)
            lm, prompt, new_tokens = choice.lm, choice.prompt, choice.new_tokens
            if options.draft is not None:
                say(f"draft: {lm.draft_summary}")
            drawn = named_sampling(folder)
            sampling = default_sampling(lm.generation_config.to_diff_dict() if drawn is None else drawn)
            told = ServingOptions(named, api_key, hosts, sampling=sampling, strict=strict)
            run = ServerRun(Service(
                lm, tokenizer, stop_ids(folder, tokenizer), prompt, new_tokens, queue, told,
                choice.turns, image_nbytes, image_files, handoff if role == "prefill" else ""), grace)
            if lm.prefixes is not None:
                lm.prefixes.open()
            _drop_cached(lm)

            def started() -> None:
                shown, number = f"[{host}]" if ":" in host else host, socket.getsockname()[1]
                say(f"serving {told.name} at http://{shown}:{number} in {lm.plan.workload.batch} slots of {prompt} "
                    f"+ {new_tokens} tokens")
                if goals is not None:
                    say(f"predicted to keep its goals up to {choice.rate:.3g} requests/s of {goals.prompt} + "
                        f"{goals.output} tokens")

            try:
                failure = run.run(socket, started)
            except OSError as error:  # another took the address just before this one listened
                if error.errno != errno.EADDRINUSE:
                    raise
                raise _cannot_listen(host, port, error) from error
        if failure is not None:
            say(f"error: the model failed: {reason_of(failure)}")
            raise typer.Exit(FAILED)
        say("stopped")


def _decode(model: str, sizes: Budget, options: Options, goals: ServingGoals | None, handoff: str) -> None:
    """Decode what a server of role prefill hands on, until a signal."""
    from forebay.commands.plan_serving import plan_serving
    from forebay.commands.prompts import load_tokenizer, stop_ids
    from forebay.serving.decode_server import DecodeServer, bound_path

    try:
        at = bound_path(handoff)
    except OSError as error:
        raise JobError(f"--handoff {handoff}: {error.strerror or error}") from error
    folder = model_folder(model, options)
    choice = plan_serving(folder, sizes, replace(options, prefix_cache=None, cache_dir=None), goals)
    lm = choice.lm
    _drop_cached(lm)
    DecodeServer(lm, choice.prompt, choice.new_tokens, frozenset(stop_ids(folder, load_tokenizer(folder))),
                 choice.turns).run(at, lambda: say(
                     f"decoding {model} at {handoff} in {lm.plan.workload.batch} slots of {choice.prompt} + "
                     f"{choice.new_tokens} tokens"))
    say("stopped")


def _without_images(sizes: Budget, memory: str | None, *, files: bool) -> tuple[Budget, int]:
    """The budget of the language model, and bytes for images. JobError where they do not go together."""
    from forebay.rewriter.ir.byte_sizes import parse_nbytes

    if memory is None:
        if files:
            raise JobError("--image-files is for a server of images: give --image-memory too, or leave it out")
        return sizes, 0
    nbytes = parse_nbytes(memory, "--image-memory")
    if nbytes >= sizes.device:
        raise JobError(f"--image-memory {memory} must be a part of the budget; give less, or a larger --budget")
    return replace(sizes, device=sizes.device - nbytes), nbytes


def _check_tower(lm: LanguageModel, image_nbytes: int) -> None:
    """JobError for memory in which the model's tower cannot be run; CheckpointError for a folder without one."""
    from forebay.rewriter.ir.byte_sizes import format_nbytes

    if image_nbytes and lm.tower.plan.weight_nbytes >= image_nbytes:
        raise JobError(f"--image-memory: the vision tower needs {format_nbytes(lm.tower.plan.weight_nbytes)} for "
                       "weights, and more for activations; give more")


def _cannot_listen(host: str, port: int, error: OSError) -> Exception:
    return JobError(f"cannot listen at {host} port {port}: {error.strerror}; name another --port or --host")


def _goals(prompt: int, new_tokens: int, given: tuple[float | None, float | None, int | None, int | None]) -> Any:
    """Return the latency goals of --ttft, --tpot, --isl and --osl; None without them. JobError where they do not go
    together."""
    from forebay.commands.plan_serving import ServingGoals

    ttft, tpot, isl, osl = given
    if ttft is None and tpot is None:
        if isl is not None or osl is not None:
            raise JobError("--isl and --osl say for which lengths --ttft and --tpot are to hold; give these too")
        return None
    if ttft is None or tpot is None or not (math.isfinite(ttft) and math.isfinite(tpot) and min(ttft, tpot) > 0):
        raise JobError("--ttft and --tpot go together, in milliseconds above 0")
    for name, mean, most, of in (("isl", isl, prompt, "prompt"), ("osl", osl, new_tokens, "new-tokens")):
        if mean is not None and mean > most:
            raise JobError(f"--{name}: {mean} is more than --{of}, {most}")
    return ServingGoals(ttft / 1e3, tpot / 1e3, isl or prompt, osl or new_tokens)


def _drop_cached(lm: LanguageModel) -> None:
    """Take the model's files out of the page cache, where they would be memory beyond the budget."""
    from forebay.drafting import files_in_budget
    from forebay.runtime.disk.page_cache import drop_file

    for path in files_in_budget(lm):
        drop_file(path)
