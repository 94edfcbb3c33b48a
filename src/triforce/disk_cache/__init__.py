"""A folder of immutable entries, found by names that nobody without its secret can make. It knows no model."""
