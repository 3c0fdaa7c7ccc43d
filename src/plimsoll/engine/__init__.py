"""Carries a plan out on a model: saved-tensor hooks, replay of dropped values, guards, the fallback."""
