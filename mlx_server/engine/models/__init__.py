"""The models on this machine: what they are, what they need, how they come here."""
