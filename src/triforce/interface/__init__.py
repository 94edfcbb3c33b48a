"""What callers pass and get: parameters, outputs, statistics. Imports no torch."""
