"""What the commands of states do once their options are read: this is what needs torch."""
