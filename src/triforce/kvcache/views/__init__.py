"""What a tier sees of a pool of pages."""
