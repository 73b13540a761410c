"""`router shadow`: beside any balancer, what its placement loses, and what `router run` would give. Decides nothing."""
