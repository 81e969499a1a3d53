"""What a model is and how its files are read."""
