"""Views of a page pool: one for each way a tier sees it."""
