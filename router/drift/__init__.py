"""Drift: how far answers on mapped KV are from native ones, measured, bounded and repaired."""
