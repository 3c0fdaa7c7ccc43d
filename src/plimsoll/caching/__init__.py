"""A question in, the answer of an earlier run out, kept as files in the cache directory of the user. No torch in here."""
