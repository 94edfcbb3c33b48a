"""Training of a feature draft on its target's hidden states, in the process that runs the target."""
