"""docs/options.md, from the table of options: python -m forebay.rewriter.report.options_page > docs/options.md"""

from __future__ import annotations

from forebay.rewriter.planning.options import GROUPS, OPTIONS

HEAD = """# Options

For users: each option of a plan, by its name in Python. The same names are keywords of `wrap(model, budget, **options)`
and fields of `forebay.Options`, which `wrap(model, budget, options)` takes. Commands that plan have them with dashes:
`cache_tier` is `--cache-tier`, and a pair is written `2,3`. A command lacks the options that it sets itself.
`torch.compile(…, options={…})` has `slots`, `slot_nbytes`, `lead` and `machine`. None, the default of most options,
leaves the choice to the planner. Leave an option out where you can: the planner then compares plans with and without
it.

`python -m forebay.rewriter.report.options_page` writes this page from the table in `rewriter/planning/options.py`.
"""


def options_page() -> str:
    """The page: a table for each group."""
    groups = [*GROUPS, *sorted({record.group for record in OPTIONS.values()} - {*GROUPS})]
    tables = [_table(group) for group in groups]
    return "\n".join([HEAD, *tables])


def _table(group: str) -> str:
    rows = [f"| `{name}` | {record.kind.words} | {record.said_default or record.default} | {record.help} |"
            for name, record in OPTIONS.items() if record.group == group]
    return "\n".join([f"## {group}", "", "| Option | Values | Default | Meaning |", "|---|---|---|---|", *rows, ""])


if __name__ == "__main__":
    print(options_page(), end="")
