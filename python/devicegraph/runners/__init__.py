"""Runners: for one phase, which sizes to capture, how a live batch gets into a captured shape, and what comes out."""
