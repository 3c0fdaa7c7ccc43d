"""Facts in, advice out: what the memory is, what to do about it, what was checked. No torch in here."""
