"""One port, many peers: a hub, and the spokes that dial it."""
