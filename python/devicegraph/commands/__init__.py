"""The commands that need no device; `devicegraph.cli` has the table of all."""
