"""Doors: one module for each interface that clients speak. A door translates requests and events.

It knows nothing of chat templates or of how models write calls (see `answers`).
"""
