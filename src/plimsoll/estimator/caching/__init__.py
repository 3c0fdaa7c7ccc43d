"""Keeps answers of earlier runs as files in the user's cache directory."""
