"""The same server and clients on real machines: one port, many clients that come, leave and come back."""
