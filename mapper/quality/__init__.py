"""Measuring what a map does to the target's answers, beside floors, controls and the source alone."""
