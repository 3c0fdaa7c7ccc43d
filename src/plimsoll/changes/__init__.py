"""A traced step in, the same step with one thing changed out: what planning, advice and explanations replay."""
