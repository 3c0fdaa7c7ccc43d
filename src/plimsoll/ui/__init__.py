"""Shows artifacts to people: the command line, terminal and HTML renderers, the demo."""
