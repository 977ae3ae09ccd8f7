"""What turns cost, and what each tenant has spent today."""
