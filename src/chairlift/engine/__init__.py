"""The engine: requests in, steps through the model, text out."""
