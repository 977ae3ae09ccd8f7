"""Ways to run Baton, and what a machine needs for it."""
