"""KV of prompts on disk: a folder of immutable entries, whose names need its secret, and files of one prompt."""
