"""Set-ups of training frameworks, one file per framework: what is trained, by one line of a user's code."""
