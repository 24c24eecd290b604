"""`forebay calibrate`: the command around `calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forebay.commands.options import ModelArgument, in_input, in_output, model_folder, panel_option, with_options
from forebay.commands.terminal import JobError, clean_errors, say
from forebay.rewriter.planning.options import Options

in_memory = panel_option("Memory")


@with_options(only=("adapter", "dequantize"))
def calibrate_command(
    model: ModelArgument,
    prompts: Annotated[Path, in_input(help='JSONL file of prompts: {"prompt": "…"} or {"messages": […]}.')],
    output: Annotated[Path, in_output(help="JSON file for the calibration.")],
    options: Options,
    budget: Annotated[str, in_memory("--budget", metavar="TIER=SIZE,…",
        help="Memory to use, by tier: 2GB, or device=120MiB,host=2GB,disk=/path.")],
    experts: Annotated[bool, in_output("--experts",
        help="Routing of experts, and hits of their pools, instead of scores.")] = False,
    tokens: Annotated[int, in_input(min=1, help="Most tokens of each prompt to read.")] = 512,
    chat: Annotated[bool | None, in_input("--chat/--no-chat",
        help="Chat template of the model around each prompt. Default: where the model has one.",
        show_default=False)] = None,
    dtype: Annotated[str, in_output(help="Dtype of the printed ranges: fp16 or bf16.")] = "bf16",
    debug: Annotated[bool, typer.Option("--debug", help="Full tracebacks of errors.")] = False,
) -> None:  # fmt: skip
    """Measure attention scores, or the routing of experts, on real prompts.

    `--calibration` takes the result. Scores are for decode attention with a shared softmax maximum on a GPU.
    """
    with clean_errors(debug):
        import torch

        from forebay.calibrate import calibrate
        from forebay.calibrate_experts import calibrate_experts
        from forebay.commands.prompts import encode, load_tokenizer, read_requests, takes_chats
        from forebay.rewriter.checkpoints.config import read_config

        chosen = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(dtype)
        if chosen is None:
            raise JobError(f"--dtype must be fp16 or bf16, found {dtype!r}")
        requests, bad = read_requests(prompts)
        _check_writable(output)
        folder = model_folder(model, options)
        config = read_config(folder).get_text_config()
        if limit := getattr(config, "max_position_embeddings", 0):
            tokens = min(tokens, limit - 1)  # a plan keeps one position for a new token
        tokenizer = load_tokenizer(folder)
        encoded, more = encode(requests, tokenizer, chat=takes_chats(tokenizer, chat), vocab_size=config.vocab_size)
        for line in sorted(bad + more, key=lambda b: b.line):
            say(f"{prompts} {line.unit} {line.line}: {line.reason}")
        if not encoded:
            raise JobError(f"{prompts} holds no prompt that can be used")
        measure = calibrate_experts if experts else calibrate
        found = measure(folder, [torch.tensor(p.ids[:tokens]) for p in encoded], budget)
        found.save(output)
        print(found.table(chosen))
        say(f"{found.prompts} prompts, {found.tokens} tokens; written to {output}")


def _check_writable(output: Path) -> None:
    """Raise OSError, naming the file, if `output` cannot be written; a file that is there keeps its contents."""
    there = output.exists()
    with open(output, "ab"):
        pass
    if not there:
        output.unlink()
