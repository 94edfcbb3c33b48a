"""`triforce serve`: OpenAI's HTTP interface in front of an engine."""
