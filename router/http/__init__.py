"""HTTP and nothing else: parsers, connections, routes. Knows no prompt, no worker and no price."""
