"""A tensor in, a smaller payload out, and back: what a saved activation can be stored as until backward needs it."""
