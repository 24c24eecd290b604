"""Execute a `Program`: devices, disk readers, the executor loop and its trace."""
