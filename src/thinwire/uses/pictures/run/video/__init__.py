"""Clips: moving garments, the small Wan that makes them, and how a page shows them."""
