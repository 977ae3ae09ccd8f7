"""Load tests: bounded, on loopback, each with a report."""
