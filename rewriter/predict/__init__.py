"""Time and memory, predicted."""
