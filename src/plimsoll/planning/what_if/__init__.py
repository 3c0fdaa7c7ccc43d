"""The same traced step with one thing changed: what planning, advice and explanations replay."""
