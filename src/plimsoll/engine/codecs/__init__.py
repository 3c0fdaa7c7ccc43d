"""Codecs that store a saved activation in fewer bytes until backward needs it."""
