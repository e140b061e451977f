"""Other systems, set up and started for comparison; none is a dependency of ours."""
