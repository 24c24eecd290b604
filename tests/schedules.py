"""Plans with other settings of their batch schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forebay.rewriter.ir.plan import Plan


def with_settings(plan: Plan, **changes: dict[str, Any]) -> Plan:
    """`plan` with these fields of these features, as `cache={"on_host": 3}`."""
    batching = plan.schedule.batching
    features = {name: replace(getattr(batching, name), **fields) for name, fields in changes.items()}
    return replace(plan, schedule=replace(plan.schedule, batching=replace(batching, **features)))
