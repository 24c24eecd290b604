"""The `forebay` command and its subcommands."""
