"""Who may enter now: concurrency and queues per tier and tenant, and rate limits."""
