"""`router shadow`: estimates what the placement of any other balancer loses, and what `router run` would save."""
