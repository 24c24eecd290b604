"""The room of a plan: prompts and answers in the slots of its batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forebay.rewriter.ir.meeting import meeting_of
from forebay.rewriter.ir.plan import Plan
from forebay.runtime.devices.device import RuntimeFault


def with_rope_switch(prompt: int, new_tokens: int, rope_switch_length: int) -> tuple[int, int]:
    """Tokens of the longest prompt and of the answer to it, where the prompt and what has followed it begin anew once
    they exceed `rope_switch_length` (0: never)."""
    if prompt <= rope_switch_length < prompt + new_tokens - 1:
        return rope_switch_length + 1, prompt + new_tokens - rope_switch_length - 1
    return prompt, new_tokens


def fits(plan: Plan, prompt: int, new_tokens: int, rope_switch_length: int = 0) -> bool:
    """Return whether a slot of `plan` has room for a prompt of so many tokens and an answer."""
    w = plan.workload  # the last token is never appended
    prompt, new_tokens = with_rope_switch(prompt, new_tokens, rope_switch_length)
    bounded = plan.prefill_overlays_kv_cache or plan.schedule.batching.admitted
    return prompt + new_tokens - 1 <= w.context and (prompt <= w.prompt or not bounded)


def require_room(plan: Plan, number: int, prompt: int, new_tokens: int, rope_switch_length: int = 0) -> None:
    """RuntimeFault, which names a sequence by its number, if no slot of `plan` has room for it."""
    if not fits(plan, prompt, new_tokens, rope_switch_length):
        w = plan.workload
        raise RuntimeFault(f"sequence {number} of {prompt} tokens with {new_tokens} new ones does not fit the plan's "
                           f"slots, which are of {w.prompt} with {w.new_tokens}; plan for more (LanguageModel.reserve)")


def refuse_crossing(plan: Plan, prompts: Sequence[torch.Tensor], new_tokens: int, rope_switch_length: int = 0) -> None:
    """RuntimeFault if the plan's cache has no room for so many prompts, or for them and their new tokens."""
    w, count, longest = plan.workload, len(prompts), max(p.numel() for p in prompts)
    if count <= w.batch and fits(plan, longest, new_tokens, rope_switch_length):
        return
    meeting = meeting_of(plan)
    where = "" if meeting is None else (
        f": its cache ends at byte {meeting.cache_top} of the device arena, the activations of a decode step begin at "
        f"byte {meeting.activation_base}, and with {meeting.sequences} sequences they would meet at {meeting.tokens} "
        "tokens each")
    raise RuntimeFault(
        f"{count} prompts of up to {longest} tokens with {new_tokens} new ones do not fit the plan, which is for "
        f"{w.batch} of {w.prompt} with {w.new_tokens}{where}; plan for more (LanguageModel.reserve)")
