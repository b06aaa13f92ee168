"""What drafts on the device: a draft model's runner beside the model's, and a model's own heads."""
