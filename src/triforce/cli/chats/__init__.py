"""The parts of `triforce chat`: what is said, who answers, and where the questions come from."""
