"""The loop that answers prompts as a plan has it: in places, with drafts that are checked, or one token a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from forebay.runtime.run.drafts import PromptLookup
from forebay.runtime.run.generation import Stop, generate_tokens
from forebay.runtime.run.places import entering, generate_in_places
from forebay.runtime.run.sampling import Sampling
from forebay.runtime.run.session import Session
from forebay.runtime.run.speculation import Tally, generate_speculatively, speculates


def generate_as_planned(
    session: Session,
    prompts: Sequence[torch.Tensor],
    sampling: Sampling,
    stop: Stop,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    on_token: Callable[[torch.Tensor], None] | None = None,
    tally: Tally | None = None,
) -> torch.Tensor:
    """`generate_tokens` by the loop that the session's plan is for; what its drafts brought is added to `tally`."""
    if entering(session.plan):
        return generate_in_places(session, prompts, sampling, stop, generator, on_token)
    if speculates(session.plan, sampling, len(prompts), generator):
        return generate_speculatively(session, prompts, sampling, stop, generator, on_token, PromptLookup(), tally)
    return generate_tokens(session, prompts, sampling, stop, generator, on_token)
