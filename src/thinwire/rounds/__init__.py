"""One model, and whoever is there: versions go out, updates come back, and rules make versions of these."""
