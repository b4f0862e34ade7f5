"""What carries out a rule on a graph: evictions op by op, copies on two lanes, segments of the forward pass that run again."""
