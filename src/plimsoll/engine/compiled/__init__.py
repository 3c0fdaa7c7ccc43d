"""Apply a plan inside torch.compile."""
