"""Plans with KV that moves between workers: how fast pairs of workers are, and which plans are worth a price."""
