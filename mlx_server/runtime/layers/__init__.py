"""Changes to the layers of an unchanged mlx-lm model: adapters, other products, whole layers, shards."""
