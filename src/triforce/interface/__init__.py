"""Interface: the parameters that callers pass, and the outputs and statistics that they get. Imports no torch."""
