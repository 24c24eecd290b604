"""What machines can do: measured profiles, and presets of machines that are not here."""
