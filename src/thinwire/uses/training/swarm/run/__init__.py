"""A swarm's runs: the keeper's program, a member's, the record and its page."""
