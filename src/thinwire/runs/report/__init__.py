"""Reports: pages and figures made from run records."""
