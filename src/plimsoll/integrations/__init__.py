"""One file per training framework: a memory budget in one line of the user's code. A file is imported only when it is named.

``budgeted`` has the code that all PyTorch integrations share. ``search`` and ``layers`` have the code that the integrations of
other frameworks share.
"""
