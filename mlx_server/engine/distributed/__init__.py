"""One model on several machines."""
