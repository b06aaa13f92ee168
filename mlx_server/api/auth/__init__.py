"""Who calls, in which tier, and what the key may still do."""
