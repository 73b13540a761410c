"""Workers of a router: discovery, health checks, event streams, snapshots, and load shared with other routers."""
