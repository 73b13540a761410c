"""HTTP protocol: parsers, client connections, routes. It knows no prompts, workers or prices."""
