"""The runner of a language model's calls: in this process alone, or with other processes alike."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from forebay.model_planner import PlannedSteps
from forebay.rewriter.ir.plan import Plan
from forebay.runtime.run.request import Request
from forebay.step_model import StepModel


class StepRunner:
    """Runs a model in this process alone."""

    def agreed(self, steps: PlannedSteps) -> Plan:
        """The plan by whose predictions a session runs, once all processes that take part have it."""
        return steps.plan

    def reserved(self) -> None:
        """Note that there is a plan for the call, so that steps come next."""

    def generating(self, lm: StepModel, *given: Any, options: dict[str, Any]) -> AbstractContextManager[None]:
        """Enter `generate` with these arguments."""
        return nullcontext()

    def answering(self, lm: StepModel, asked: Sequence[Request], *given: Any) -> AbstractContextManager[None]:
        """Enter `answer_all` with these arguments."""
        return nullcontext()
