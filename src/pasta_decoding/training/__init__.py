"""Teaching a model to write the language."""
