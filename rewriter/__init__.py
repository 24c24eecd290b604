"""Capture, plan, verify and assemble: everything that decides what a model's graph becomes."""
