"""One tensor-parallel group: scheduling in plain Python, tensors on the ranks."""
