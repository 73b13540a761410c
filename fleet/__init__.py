"""A fleet of workers and routers on Ray: started, placed, restarted, replaced and scaled.

Ray carries none of the requests and none of the events: workers and routers are native processes that know each other
by HTTP and ZeroMQ, as without Ray. This package knows engine and router by their command lines and their HTTP alone.

`plan` decides, and is pure; `spec` says what a fleet is; `directory` and `member` are the actors, `cluster` knows what
Ray says of all, `guard` is the process between an actor and its program, `cli` the command line, `serve` a plug-in for
Ray Serve. Nothing here scales with the load: Ray Serve's autoscaling does that.
"""

DISTRIBUTION = "blockcast"
