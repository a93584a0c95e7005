"""Local steps in a loop of one's own: whichever model, optimiser and framework it has."""
