"""The worker's stream on its way to the client: raw bytes, with a parser beside them."""
