"""Recommends a method for a model, with its numbers, a checklist and known ways to fail."""
