"""Devices that execute items: threads, CUDA streams, a virtual clock."""
