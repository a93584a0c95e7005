"""Where clients come in: the socket, and how many there may be."""
