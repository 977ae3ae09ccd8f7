"""Tuning, replaying and checking policies away from the gateway."""
