"""A linear head and its cross-entropy, computed chunk by chunk. `plimsoll.chunked` is the public page."""
