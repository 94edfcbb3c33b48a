"""Models, tokenizers and chat templates from files."""
