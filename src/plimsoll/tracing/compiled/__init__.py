"""Read what torch.compile makes of a training step: its joint graphs, and a trace of the step with its compiled parts."""
