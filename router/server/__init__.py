"""Running the gateway: the HTTP server, its processes and its shutdown."""
