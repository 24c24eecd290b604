"""`python -m forebay` is the `forebay` command."""

from forebay.commands.cli import main

main()
