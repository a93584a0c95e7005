"""Run records: what every run leaves, written, read and summed."""
