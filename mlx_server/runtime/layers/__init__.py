"""What is put behind the layers of an unchanged mlx-lm model: adapters, other products, a part of the whole."""
