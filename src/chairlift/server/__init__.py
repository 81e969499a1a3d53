"""HTTP: the API that programs already speak."""
