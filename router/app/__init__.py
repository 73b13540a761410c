"""The program `router run`: its routes, pages, processes and command line, built from the rooms below."""
