"""Structured output: texts constrained by a JSON schema, a regular expression or a grammar."""
