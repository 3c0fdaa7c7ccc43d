"""Facts about a step in, the items of its training budget out. No torch in here."""
