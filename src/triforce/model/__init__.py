"""What a model is: shape, rotations, weights."""
