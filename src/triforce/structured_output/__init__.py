"""Texts held to a JSON schema, a regular expression or a grammar."""
