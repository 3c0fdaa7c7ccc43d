"""What torch.compile makes of a training step: its joint graphs, and the step with compiled parts in it."""
