"""The program `router run`: its routes, pages, process and command line, built from the rooms below."""
