"""The coordinator in plain Python: its view of all groups, what they are committed to, and where an ask goes."""
