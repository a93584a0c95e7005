"""Pictures from several machines: the model that comes with thinwire, its sheets, and runs of them."""
