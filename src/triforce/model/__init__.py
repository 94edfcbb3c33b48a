"""Model: shape, rotations, weights."""
