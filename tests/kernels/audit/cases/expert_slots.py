"""Configurations of `products/expert_slots/gpu.py` that are audited."""

from __future__ import annotations

from forebay.kernels.products.expert_slots.gpu import PICKS, TILE, assign_kernel, fetch_kernel
from forebay.kernels.products.expert_slots.reference import DECAY_SHIFT, ONCE
from tests.kernels.audit.audit_case import AuditCase


def audit_cases() -> list[AuditCase]:
    """A decode step of Qwen3-30B-A3B, whose experts in 4 bits have 2.5 MiB, with 40 slots a layer."""
    picks, slots, experts, row = 8, 40, 128, 5 << 19
    sizes = dict.fromkeys(("picks", "slots", "experts", "rounds", "most", "beside", "stride"), "i32")
    pointers = {"index_ptr": "*i64", "places_ptr": "*i64", "state_ptr": "*i64", "told_ptr": "*i64"}
    moved = 8 * (picks + 2 * (slots + experts))
    fetched = {"table_ptr": "*i64", "index_ptr": "*i64", "out_ptr": "*i64"}
    return [
        AuditCase("assign_slots/assign", assign_kernel, pointers | sizes,
                  {"HAS_PLACES": False, "ONCE": ONCE, "SHIFT": DECAY_SHIFT, "E": 128, "S": 64,
                   "B": PICKS},
                  divisible=tuple(pointers), load_nbytes=4, bytes_moved=moved, minimum_bytes=moved),
        *(AuditCase(f"assign_slots/{name}", fetch_kernel,
                    fetched | dict.fromkeys(("slots", "row", "programs", "rows"), "i32"),
                    {"ALIKE": False, "BACK": back, "S": 64, "B": TILE},
                    divisible=(*fetched, "row", "programs", "rows"),
                    bytes_moved=2 * picks * row, minimum_bytes=2 * picks * row)
          for name, back in (("fetch", False), ("store", True))),
    ]  # fmt: skip
