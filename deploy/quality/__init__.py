"""What a KV precision costs a model."""
