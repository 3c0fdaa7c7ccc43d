"""The verbs plan, apply, attach and load, for one process and for several ranks."""
