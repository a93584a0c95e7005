"""Plans before serving: the layers of each machine, the recipe, and what a text will take."""
