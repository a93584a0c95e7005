"""What commands share: options, errors, output, a live line."""
