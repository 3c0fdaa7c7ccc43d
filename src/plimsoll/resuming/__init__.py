"""What a run needs to go on as if it had never stopped: its tensors by name, its random streams, and files that are whole."""
