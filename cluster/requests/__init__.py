"""One request from ask to end: a pure state machine, and the asyncio shell that carries its calls."""
