"""Who the workers are and what they hold: discovery, their event streams, snapshots, other routers."""
