"""Recommends a method to save memory for a model, with numbers, a checklist and known failure modes."""
