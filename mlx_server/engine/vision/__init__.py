"""Images before the model: found in messages, decoded, and prepared as inputs of the encoder and tokens of the
prompt."""
