"""What training runs leave beside the envelope of every run: losses, decisions, the page that shows them."""
