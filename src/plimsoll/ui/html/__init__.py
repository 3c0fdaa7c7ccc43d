"""Renders documents as one self-contained HTML page with charts, tables and style. It does not need torch or a network."""
