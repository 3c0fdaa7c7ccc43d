"""Seconds of ops and collectives on devices that are not here: the roofline and its catalogue of devices."""
