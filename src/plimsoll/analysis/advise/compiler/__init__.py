"""Asks torch.compile's front end what it captures of a model, without compiling any kernel."""
