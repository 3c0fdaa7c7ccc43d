"""Builds a model and a batch from a user's target: a function, a config.json, or a catalogue name."""
