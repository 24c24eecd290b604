"""Forebay: run PyTorch language models larger than the fast memory you have."""
