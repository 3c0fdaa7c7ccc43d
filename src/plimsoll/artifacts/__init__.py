"""Records that one stage hands to the next: frozen, versioned, saved as JSON. They import neither torch nor the views."""
