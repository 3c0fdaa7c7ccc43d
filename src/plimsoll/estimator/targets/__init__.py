"""Builds a model and a batch from what a user names: a function, a config.json, a catalogue name."""
