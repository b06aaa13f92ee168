"""What layers keep: K/V, states, the pools they lie in."""
