"""Links that carry saved activations to host memory or disk and back."""
