"""Seconds of ops and collectives on devices that this machine does not have: a roofline and its catalogue of devices."""
