"""What a model is: dimensions, weights, tokenizer, chat template and forward pass. Knows no requests and no server."""
