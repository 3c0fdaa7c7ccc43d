"""Computes seconds of ops and collectives on devices that this machine does not have: a roofline with a device catalogue."""
