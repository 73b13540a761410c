"""A fleet of workers and routers on Ray: started, placed, restarted, replaced and scaled.

Ray carries none of the requests and none of the events: workers and routers are native processes that know each other
by HTTP and ZeroMQ, as without Ray. This package knows engine and router by their command lines and their HTTP alone.

`plan` decides, and is pure; `spec` says what a fleet is; `directory` and `member` are the actors; `program` keeps one
program running behind an actor, and `guard` is the process between the two; `cli` is the command line, `serve` a
plug-in for Ray Serve. Ray chooses the nodes, and restarts the directory. Nothing here scales with the load: Ray Serve's
autoscaling does that.
"""

DISTRIBUTION = "blockcast"
