"""Load on servers, the engine against the machine, one server against another."""
