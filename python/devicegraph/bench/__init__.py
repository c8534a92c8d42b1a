"""What `devicegraph bench` measures: fills, steps, memory, captures and the start, as ratios of one run."""
