"""Plans, graphs and Programs as text."""
