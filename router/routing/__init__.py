"""Which tier answers a turn: policies kept fresh, what they are told, and their decisions' log."""
