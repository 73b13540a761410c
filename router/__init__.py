"""The router: follows what workers hold, and sends each request to the one that will answer it first."""

DISTRIBUTION = "blockcast"
