"""What the kernel knows and does of TCP: counts, congestion control, idle windows."""
