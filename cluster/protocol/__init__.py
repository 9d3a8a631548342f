"""OpenAI's protocol over HTTP: bodies in, answers and event streams out. Loads neither torch nor Ray."""
