"""One file per training framework: a budget in one line of the user's code. None of them is loaded until it is named.

``budgeted`` and ``own_checkpointing`` are what the integrations of PyTorch share; ``search`` and ``layers`` are what those
beyond PyTorch share.
"""
