"""Drafts: who makes them, who may, and how many a step carries."""
