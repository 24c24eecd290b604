"""CUDA GPUs as a device."""
