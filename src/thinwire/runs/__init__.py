"""What all runs and commands share: options, records, reports, data, models, emulated links, processes."""
