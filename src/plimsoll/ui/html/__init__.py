"""Renders documents (the contents of saved results) as one self-contained HTML page with charts, tables and style.

This package needs neither torch nor a network.
"""
