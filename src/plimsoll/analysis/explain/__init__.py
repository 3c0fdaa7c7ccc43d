"""Says why a step's peak is what it is, and what would lower it."""
