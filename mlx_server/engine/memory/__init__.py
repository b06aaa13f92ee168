"""Memory: the ledger, what a model will need, and what happens when it runs short."""
