"""How each family of models spells its config.json."""
