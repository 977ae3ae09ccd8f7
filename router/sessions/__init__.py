"""Session state: which model answered last and in which KV namespace each model continues."""
