"""HTTP below the protocols: connections, bodies, turns, events."""
