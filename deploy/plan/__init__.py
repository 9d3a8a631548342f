"""What a model takes in memory, and what fits."""
