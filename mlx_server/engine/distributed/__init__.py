"""One model over several machines."""
