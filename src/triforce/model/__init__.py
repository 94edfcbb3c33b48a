"""The shape of a model, its rotations, and its weights."""
