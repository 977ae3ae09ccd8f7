"""One turn from the request to the last byte of its answer."""
