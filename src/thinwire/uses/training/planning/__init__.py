"""Plans before a run: order, cut, schedule and recipe for given machines."""
