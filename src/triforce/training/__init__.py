"""Training of a feature draft on what its target computes, in the process that runs the target."""
