"""transformers' own modules, whose layers are read from the model's files as they are called."""
