"""A pipeline's schedule and seconds per stage in, the order and the timeline of every action out."""
