"""What one stage hands to the next: frozen, versioned records that are saved as JSON. No torch, no presentation."""
