"""Delta folders: what slime, miles, modelexpress and TRL write to disk for each version, read and written."""
