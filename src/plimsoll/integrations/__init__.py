"""One file per training framework: a budget in one line of the user's code. None of them is loaded until it is named.

``budgeted`` is what the integrations of PyTorch share; ``search`` and ``layers`` are what those beyond PyTorch share.
"""
