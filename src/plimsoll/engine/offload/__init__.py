"""Links: they carry saved activations to host memory or disk, and bring them back."""
