"""What calibration reads: documents as token windows, and the caches and queries of a model."""
