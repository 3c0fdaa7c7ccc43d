"""A model in, the model of one rank out: local shapes and stand-in collectives."""
