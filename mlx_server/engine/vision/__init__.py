"""Images on the host's side: found in messages, decoded, made into a vision encoder's inputs and a prompt's tokens."""
