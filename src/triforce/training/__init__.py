"""Training of an EAGLE head on what its target computes, in the process that runs the target."""
