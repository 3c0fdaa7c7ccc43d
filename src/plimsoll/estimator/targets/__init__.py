"""Builds a model and a batch from the text that names the user's target: a function, a config.json, or a catalogue name."""
