"""KV-cache mapping between models of one family: calibrate, convert, store, serve."""
