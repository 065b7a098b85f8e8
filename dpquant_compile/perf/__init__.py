"""What a step costs: stage timing, and the paper's speed-up model."""
