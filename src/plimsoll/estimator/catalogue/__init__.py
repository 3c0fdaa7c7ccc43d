"""Models that the command line knows by name: data only; they are never downloaded."""
