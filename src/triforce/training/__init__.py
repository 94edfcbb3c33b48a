"""Training of an EAGLE head on its target's hidden states, in the process that runs the target."""
