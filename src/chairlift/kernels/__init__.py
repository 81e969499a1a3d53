"""The ops that model files are written in, and the backends that compute them. Knows neither scheduling nor HTTP."""
