"""`forebay serve`: an OpenAI-compatible server for one model within a budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.commands.machine import machine_profile
from forebay.commands.options import (
    BudgetOption,
    CacheOption,
    DebugOption,
    DequantizeOption,
    MachineOption,
    ModelArgument,
    SpeculateOption,
    model_folder,
)
from forebay.commands.terminal import FAILED, clean_errors, console, say

if TYPE_CHECKING:
    from forebay.api import LanguageModel

PLACES = (16, 8, 4, 2, 1)  # that are compared where none are named


def serve(
    model: ModelArgument,
    budget: BudgetOption = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    api_key: Annotated[str | None, typer.Option(envvar="FOREBAY_API_KEY", show_envvar=True,
                                                help="Key that requests must bear.")] = None,
    name: Annotated[str | None, typer.Option(help="Of the model, for clients (default: that of MODEL).")] = None,
    prompt: Annotated[int, typer.Option(min=1, help="Longest prompt, in tokens.")] = 512,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    places: Annotated[int | None, typer.Option(
        min=1, max=256, help="Requests computed at once (default: the planner's choice).")] = None,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait; beyond, clients hear 429.")] = 64,
    grace: Annotated[float, typer.Option(min=0, help="Seconds to finish what runs when told to stop.")] = 300.0,
    cache: CacheOption = "native",
    speculate: SpeculateOption = None,
    dequantize: DequantizeOption = False,
    machine: MachineOption = None,
    debug: DebugOption = False,
) -> None:
    """Serve MODEL to OpenAI's clients within a budget, until Ctrl-C or SIGTERM, which finish what runs.

    Exit code: 0 stopped, 2 failed.
    \f
    Long: a third of it is the options, one by one.
    """
    with clean_errors(debug):
        from forebay.commands.prompts import JobError, load_tokenizer, stop_ids
        from forebay.rewriter.ir.plan import PlanError
        from forebay.serving.run_server import LOOPBACK, ServerRun, Service, ServingOptions, bound_socket

        if budget is None:
            raise PlanError("say how much memory may be used, as --budget device=120MiB")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key
                                        and api_key):
            raise JobError("--api-key must be printable ASCII without spaces at its ends")
        try:
            socket = bound_socket(host, port)
        except OSError as error:
            raise JobError(f"cannot listen at {host} port {port}: {error.strerror}; name another --port or --host"
                           ) from error
        with socket:
            folder = model_folder(model, dequantize)
            tokenizer = load_tokenizer(folder)
            with console().status("capturing and planning"):
                lm = _planned(folder, budget, prompt, max_new_tokens, places, cache, machine, speculate is not False)
            limit = lm.captured.max_positions
            alone = host in ("localhost", "127.0.0.1", "::1") and api_key is None
            named = name or Path(model).expanduser().resolve().name
            options = ServingOptions(named, api_key, frozenset(LOOPBACK) if alone else None)
            run = ServerRun(Service(
                lm, tokenizer, stop_ids(folder, tokenizer), prompt,
                min(max_new_tokens, limit - prompt) if limit else max_new_tokens, queue, options), grace)
            _drop_cached(lm)
            if api_key is None and not alone:
                say(f"whoever reaches {host} may use this server; --api-key asks for a key")

            def started() -> None:
                shown, number = f"[{host}]" if ":" in host else host, socket.getsockname()[1]
                say(f"serving {options.name} at http://{shown}:{number} in {lm.plan.workload.batch} places of {prompt} "
                    f"+ {run.service.new_tokens} tokens")

            failure = run.run(socket, started)
        if failure is not None:
            say(f"error: the model failed: {' '.join(str(failure).split())}")
            raise typer.Exit(FAILED)
        say("stopped")


def _planned(
    folder: Path, budget: str, prompt: int, new_tokens: int, places: int | None, cache: str, machine: Path | None,
    speculate: bool = True,
) -> LanguageModel:
    """The model planned once: for so many places, or for the number with which a sequence is predicted to take least
    time. Steps of a single place may check what was looked up, where that costs next to nothing."""
    from forebay.api import LanguageModel
    from forebay.open_model import open_model
    from forebay.rewriter.ir.byte_sizes import parse_budget
    from forebay.rewriter.ir.plan import PlanError, Workload
    from forebay.rewriter.plan_block import plan_block
    from forebay.rewriter.plan_places import entering_at_once, sequence_time_s
    from forebay.rewriter.planning.wishes import Wishes
    from forebay.runtime.disk.spill import require_spill_folder

    sizes = parse_budget(budget)
    require_spill_folder(sizes.disk)

    def choose(graphs_of: Any, limits: Any, workload: Any, wishes: Any, profile: Any, switches: Any) -> Any:
        found, refused = [], None
        alone = replace(wishes, entering=None, cache_tier="device")  # only then can steps check what is looked up
        for count in (places,) if places else PLACES:
            work = Workload(count, workload.prompt, workload.new_tokens)
            for wished in (alone,) * (speculate and count == 1) + (
                    replace(wishes, entering=entering_at_once(count)),):
                try:
                    found.append(plan_block(graphs_of, limits, work, wished, profile, switches))
                    break
                except PlanError as error:
                    refused = error
        if not found:
            assert refused is not None
            raise refused
        return min(found, key=lambda way: sequence_time_s(way[1]))

    wishes = Wishes(cache_format=cache, entering=entering_at_once(places or 1),
                    drafted_tokens="auto" if speculate else None)
    return LanguageModel(*open_model(folder), sizes, Workload(places or 1, prompt, new_tokens), wishes,
                         machine_profile(machine, folder), choose=choose)


def _drop_cached(lm: LanguageModel) -> None:
    """Take the model's files out of the page cache, where they would be memory beyond the budget."""
    from forebay.runtime.disk.page_cache import drop_file

    for path in {f.path for f in lm.files.values()}:
        drop_file(path)
