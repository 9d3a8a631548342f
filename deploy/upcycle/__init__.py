"""Checkpoints with fewer KV heads."""
