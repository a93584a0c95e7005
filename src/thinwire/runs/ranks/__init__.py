"""The processes of a run: where they live, how they meet, what they tell each other."""
