"""Models that the command line knows by name: data only, nothing is downloaded."""
