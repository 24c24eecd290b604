"""The CPU as a device: a slice of host memory, and threads in place of streams."""
