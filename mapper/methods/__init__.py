"""The ways to fit a map from one model's cache to another's, one module each."""
