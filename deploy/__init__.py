"""From a config to a running service."""
