"""Parameters, outputs and statistics that callers pass and get. Imports no torch."""
