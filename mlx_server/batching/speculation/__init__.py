"""Drafts: what makes them, which requests get them, and how many a step carries."""
