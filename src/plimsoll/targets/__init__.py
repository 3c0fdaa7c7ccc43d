"""What a user names in, a model with a batch out: built from a function, a configuration or the catalogue."""
