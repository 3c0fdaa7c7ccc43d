"""Simulates pipeline schedules: which action runs when on which rank, and what each rank holds."""
