"""One peer: a socket, reliability, and estimates of the link to it."""
