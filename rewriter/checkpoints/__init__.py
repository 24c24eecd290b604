"""Weights in files: safetensors, packed rows, GGUF, and what a user names resolved to them."""
