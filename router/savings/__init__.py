"""What carrying KV over saved: a prefill model per worker, and the books."""
