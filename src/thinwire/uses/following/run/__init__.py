"""The state demo: one process trains, others follow its weights."""
