"""Layouts of a model over several chips: what each costs, and which to take."""
