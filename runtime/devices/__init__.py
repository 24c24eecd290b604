"""What executes items: threads, CUDA streams, a virtual clock."""
