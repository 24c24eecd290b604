"""From captured graphs to verified Programs: the list of passes, and the plans that choose among their options."""
