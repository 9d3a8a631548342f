"""Tokens and text: tokenizer, chat templates, incremental detokenising, stop strings. Loads no torch."""
