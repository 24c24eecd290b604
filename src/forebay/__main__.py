"""`python -m forebay` is the `forebay` command."""

from forebay.cli import main

main()
