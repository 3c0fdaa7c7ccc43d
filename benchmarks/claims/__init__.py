"""Published claims beside our figures: each one a statement, its source, our reading of it and code that computes ours."""
