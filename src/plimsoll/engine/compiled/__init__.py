"""A plan at work inside of torch.compile."""
