"""The demo: a real architecture learns real text with and without a memory budget, through the public functions only."""
